"""Gradients on the GPU, without atomics: every sum has one owner and one order.

    gradient_rows   lse2 and delta of every row; dsinks       one launch, one more for sinks
    dkdv            dK and dV, by key tile                    four products per tile
    dq              dQ, by query tile                         three products per tile
    dbias           the bias, by tile of the bias             only if wanted

Seven products where one pass would do with five; but a single pass has to add dQ from many blocks,
in an order that either varies or is waited for. The scores are computed again in each pass, so
memory stays linear in the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.cache import Cache
from lockstep.kernels.kernel import Gradients, Needs
from lockstep.kernels.triton.dbias import sum_bias
from lockstep.kernels.triton.dkdv import sum_keys
from lockstep.kernels.triton.dq import sum_queries
from lockstep.kernels.triton.gradient_rows import prepare_rows, sum_sinks
from lockstep.kernels.triton.launch import Launch, device_of, scales_of, strides_of, window_of
from lockstep.kernels.triton.plan import block_of, blocks_of
from lockstep.problem import AttentionProblem, Tensors

SINK_ROWS = 1024


@dataclass(frozen=True)
class Cut:
    """How one pass is cut into programs. Its blocks decide the bits; the rest does not."""

    BLOCK_Q: int
    BLOCK_KV: int
    num_warps: int
    num_stages: int

    @property
    def copies(self) -> int:
        """For `gradient_tiles.load_statistics`: as many elements as threads, if two copies do."""
        threads = 32 * self.num_warps
        return 2 if threads == 4 * self.BLOCK_Q else 1


# By the larger of the padded head dims: dkdv, dq. The first table is for Hopper and its successors
# in data centres, whose products need few registers; the second does with 99 KB of shared memory.
_HALF = {
    64: (Cut(64, 64, 4, 3), Cut(64, 64, 4, 3)),
    128: (Cut(64, 128, 8, 3), Cut(128, 64, 8, 3)),
    256: (Cut(32, 64, 8, 2), Cut(128, 32, 8, 2)),
    512: (Cut(16, 32, 8, 1), Cut(32, 16, 8, 1)),
}
_HALF_SMALL = {
    64: (Cut(32, 64, 4, 3), Cut(64, 32, 4, 3)),
    128: (Cut(32, 64, 4, 2), Cut(64, 32, 4, 2)),
    256: (Cut(16, 32, 4, 2), Cut(32, 32, 4, 1)),
    512: (Cut(16, 16, 8, 1), Cut(16, 16, 8, 1)),
}
_SINGLE = {
    64: (Cut(32, 32, 4, 2), Cut(32, 32, 4, 2)),
    128: (Cut(32, 32, 4, 1), Cut(32, 32, 4, 1)),
    256: (Cut(16, 16, 4, 1), Cut(16, 16, 4, 1)),
    512: (Cut(16, 16, 8, 1), Cut(16, 16, 8, 1)),
}
LARGE_SHARED_MEMORY = 227 * 1024


def cuts_of(problem: AttentionProblem, shared_memory: int) -> tuple[Cut, Cut]:
    """The cuts for dK and dV, and for dQ."""
    table = _HALF if shared_memory >= LARGE_SHARED_MEMORY else _HALF_SMALL
    if problem.dtype == torch.float32:
        table = _SINGLE
    return table[max(64, block_of(problem.D), block_of(problem.Dv))]


class Call:
    """What derives one problem with inputs of given strides and alignment."""

    def __init__(self, problem: AttentionProblem, tensors: Tensors, dout: Tensor) -> None:
        # Kept, so that no other problem gets its id.
        self.problem = problem
        given = (*tensors[:3], dout)
        q, k, v, dout = aligned = [_with_aligned_rows(x) for x in given]
        self.copies = any(x is not y for x, y in zip(given, aligned, strict=True))
        tensors = tensors._replace(q=q, k=k, v=v)
        packed = problem.layout == "varlen"
        B = 1 if packed else problem.B
        self.rows_shape = (B, problem.Hq, problem.Sq, 2)
        arguments = {**_arguments(problem, tensors, dout), "H": problem.Hq, "S": problem.Sq}
        arguments |= {"stride_rb": problem.Hq * problem.Sq, "stride_rh": problem.Sq, "stride_rs": 1}
        if packed:
            arguments |= {"stride_rb": 0, "stride_rh": 1, "stride_rs": problem.Hq}
        block_rows = max(16, 8192 // arguments["BLOCK_DV"])
        row_tiles = triton.cdiv(problem.Sq, block_rows) * problem.Hq * B
        self.rows = Launch(prepare_rows, (row_tiles,), arguments | {"BLOCK_ROWS": block_rows})
        self.sinks = Launch(sum_sinks, (problem.Hq,), arguments | {"B": B, "BLOCK_ROWS": SINK_ROWS})
        for_keys, for_queries = cuts_of(problem, device_of(dout.device).shared_bytes)
        n_keys = _slots(problem, problem.Skv, for_keys.BLOCK_KV)
        n_queries = _slots(problem, problem.Sq, for_queries.BLOCK_Q)
        self.keys = _launch(sum_keys, n_keys * problem.Hkv * B, arguments, for_keys, n_slots=n_keys)
        self.queries = _launch(
            sum_queries, n_queries * problem.Hq * B, arguments, for_queries, n_slots=n_queries
        )
        self.bias = None if tensors.bias is None else _launch_bias(arguments, tensors, for_queries)

    def __call__(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        dout: Tensor,
        dlse: Tensor | None,
        needs: Needs,
    ) -> Gradients:
        q, k, v, bias, sinks, kv_lens, cu_q, cu_k, _ = tensors
        if self.copies:
            q, k, v, dout = (_with_aligned_rows(x) for x in (q, k, v, dout))
        rows = lse.new_empty(self.rows_shape)
        self.rows(out, dout, lse, dlse, rows)
        dq = dk = dv = dbias = dsinks = None
        pointers = (q, k, v, bias, kv_lens, cu_q, cu_k, dout, rows)
        if needs.k or needs.v:
            # Both come out of one pass; the one nobody asked for is dropped.
            dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
            self.keys(*pointers, dk, dv)
        if needs.q:
            dq = q.new_empty(q.shape)
            self.queries(*pointers, dq)
        if needs.bias and bias is not None and self.bias is not None:
            dbias = bias.new_empty(bias.shape)
            self.bias(q, k, v, bias, kv_lens, dout, rows, dbias)
        if needs.sinks and sinks is not None:
            dsinks = sinks.new_empty(sinks.shape)
            self.sinks(sinks, rows, dsinks)
        return Gradients(dq, dk if needs.k else None, dv if needs.v else None, dbias, dsinks)


_CALLS: Cache[tuple[Any, ...], Call] = Cache(limit=1024)


def backward(
    problem: AttentionProblem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs: Needs,
) -> Gradients:
    """As `lockstep.kernels.kernel.Kernel.backward` says."""
    if 0 in (problem.B, problem.Sq, problem.Skv):
        return _without_pairs(tensors, lse, dlse, needs)
    call = _call_for(problem, tensors, out, lse, dout, dlse)
    if dout.is_cuda and dout.get_device() != torch.cuda.current_device():
        with torch.cuda.device(dout.device):
            return call(tensors, out, lse, dout, dlse, needs)
    return call(tensors, out, lse, dout, dlse, needs)


def _call_for(
    problem: AttentionProblem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
) -> Call:
    """The call prepared for this problem, these strides and this alignment."""
    q, k, v, bias = tensors[:4]
    # Triton compiles for pointers that are multiples of 16 bytes, or for any: each by itself.
    offsets = [x.data_ptr() & 15 for x in (*tensors, out, lse, dout, dlse) if x is not None]
    key = (
        id(problem),
        q.stride(),
        k.stride(),
        v.stride(),
        dout.stride(),
        None if bias is None else bias.stride(),
        tuple(offsets) if any(offsets) else None,
        dlse is None,
        dout.get_device(),
    )
    call = _CALLS.get(key)
    if call is None:
        call = _CALLS[key] = Call(problem, tensors, dout)
    return call


def _with_aligned_rows(x: Tensor) -> Tensor:
    """x, or a copy of it, with rows that start at multiples of 16 bytes.

    Otherwise every element would be loaded by itself, in each pass and for each tile again.
    """
    unit = 16 // x.element_size()
    if x.data_ptr() % 16 == 0 and all(stride % unit == 0 for stride in x.stride()[:-1]):
        return x
    D = x.shape[-1]
    copy = x.new_empty(*x.shape[:-1], -(-D // unit) * unit)[..., :D]
    return copy.copy_(x)


def _without_pairs(tensors: Tensors, lse: Tensor, dlse: Tensor | None, needs: Needs) -> Gradients:
    """Without rows or keys, only the sinks may have a gradient: lse is then the sink itself."""
    grads = {
        name: torch.zeros_like(getattr(tensors, name), memory_format=torch.contiguous_format)
        for name in needs._fields
        if getattr(needs, name)
    }
    if "sinks" in grads and dlse is not None and lse.numel():
        # Rows without a sink either have lse -inf. Dim 1 holds the heads in every layout.
        share = dlse.masked_fill(lse == -torch.inf, 0.0)
        others = [dim for dim in range(lse.dim()) if dim != 1]
        grads["sinks"].copy_(share.sum(others, dtype=torch.float64))
    return Gradients(*map(grads.get, Gradients._fields))


def _slots(problem: AttentionProblem, S: int, block: int) -> int:
    """Tiles of a head; in a packed batch one more per sequence, see `tiles.find_sequence`."""
    return S // block + problem.B if problem.layout == "varlen" else triton.cdiv(S, block)


def _launch(kernel: Any, programs: int, arguments: dict[str, Any], cut: Cut, **more: Any) -> Launch:
    blocks = {"BLOCK_Q": cut.BLOCK_Q, "BLOCK_KV": cut.BLOCK_KV, "COPIES": cut.copies}
    options = {"num_warps": cut.num_warps, "num_stages": cut.num_stages}
    return Launch(kernel, (programs,), arguments | blocks | more, **options)


def _launch_bias(arguments: dict[str, Any], tensors: Tensors, cut: Cut) -> Launch:
    B, Hq, Sq, Skv = tensors.bias.shape
    programs = B * Hq * triton.cdiv(Sq, cut.BLOCK_Q) * triton.cdiv(Skv, cut.BLOCK_KV)
    return _launch(
        sum_bias,
        programs,
        arguments,
        cut,
        bias_B=B,
        bias_Hq=Hq,
        bias_Sq=Sq,
        bias_Skv=Skv,
        SHARED_Q=Sq < arguments["Sq"],
        SHARED_KV=Skv < arguments["Skv"],
    )


def _arguments(problem: AttentionProblem, tensors: Tensors, dout: Tensor) -> dict[str, Any]:
    """What the passes take besides pointers, tiles and blocks."""
    strides = strides_of(problem, tensors)
    # By sequence, head and token.
    of_dout = (dout.stride(0), dout.stride(1), dout.stride(2))
    if problem.layout == "varlen":
        of_dout = (0, dout.stride(1), dout.stride(0))
    strides |= dict(zip(("stride_ob", "stride_oh", "stride_os"), of_dout, strict=True))
    # Rows start at multiples of 16 bytes.
    align = 16 // dout.element_size()
    BLOCK_D, BLOCK_DV = blocks_of(problem, device_of(dout.device))
    return {
        **strides,
        **{name: stride // align for name, stride in strides.items() if name[7] in "qkvo"},
        **{name: getattr(problem, name) for name in ("B", "Hq", "Sq", "Skv", "scale", "D")},
        **scales_of(problem),
        **window_of(problem),
        "DV": problem.Dv,
        "GROUP": problem.Hq // problem.Hkv,
        "ALIGN": align,
        "BLOCK_D": BLOCK_D,
        "BLOCK_DV": BLOCK_DV,
    }
