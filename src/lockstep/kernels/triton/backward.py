"""Gradients on the GPU, without atomics: every sum has one owner and one order.

    gradient_rows   m, l and delta of every row; dsinks       one launch, one more for sinks
    dkdv            dK and dV, by key tile                    four products per tile
    dq              dQ, by query tile                         three products per tile
    dbias           the bias, by tile of the bias             only if wanted

Seven products where one pass would do with five; but a single pass has to add dQ from many blocks,
in an order that either varies or is waited for. The scores are computed again in each pass, so
memory stays linear in the sequence.
"""

from __future__ import annotations

from functools import partial
from operator import is_
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.allocate import allocator
from lockstep.kernels.device_call import DeviceCall
from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs, PreparedBackward
from lockstep.kernels.triton.dbias import sum_bias
from lockstep.kernels.triton.dkdv import sum_keys
from lockstep.kernels.triton.dq import sum_queries
from lockstep.kernels.triton.gradient_rows import prepare_rows, sum_sinks
from lockstep.kernels.triton.launch import Launch, device_of, scales_of, strides_of, window_of
from lockstep.kernels.triton.plan import Device, Tiles, block_of, blocks_of
from lockstep.problem import AttentionProblem, Tensors

SINK_ROWS = 1024


# By the larger of the padded head dims: dkdv, dq. The first table is for Hopper and its successors
# in data centres, whose products need few registers; the last does with 99 KB of shared memory. On
# Hopper, unless a bias takes the registers, the second goes first: with D 64, three programs of dq
# share a multiprocessor; with D 256, tiles fill its shared memory.
_HALF = {
    64: (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3)),
    128: (Tiles(64, 128, 8, 3), Tiles(128, 64, 8, 3)),
    256: (Tiles(32, 64, 8, 2), Tiles(128, 32, 8, 2)),
    512: (Tiles(16, 32, 8, 1), Tiles(32, 16, 8, 1)),
}
_HALF_HOPPER = {
    **_HALF,
    64: (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3, registers=168)),
    256: (Tiles(64, 64, 8, 2), Tiles(128, 32, 8, 3)),
}
_HALF_SMALL = {
    64: (Tiles(32, 64, 4, 3), Tiles(64, 32, 4, 3)),
    128: (Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    256: (Tiles(16, 32, 4, 2), Tiles(32, 32, 4, 1)),
    512: (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
_SINGLE = {
    64: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    128: (Tiles(32, 32, 4, 1), Tiles(32, 32, 4, 1)),
    256: (Tiles(16, 16, 4, 1), Tiles(16, 16, 4, 1)),
    512: (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
# Tensor cores take float32 for tf32, and want larger tiles.
_TF32_HOPPER = {
    **_SINGLE,
    64: (Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    128: (Tiles(32, 64, 8, 2), Tiles(64, 32, 8, 2)),
}
LARGE_SHARED_MEMORY = 227 * 1024


def copies_of(cut: Tiles) -> int:
    """For `gradient_tiles.load_pair`: as many elements as threads, if two copies do."""
    return 2 if 32 * cut.num_warps == 4 * cut.BLOCK_Q else 1


def cuts_of(problem: AttentionProblem, device: Device) -> tuple[Tiles, Tiles]:
    """The cuts for dK and dV, and for dQ."""
    if problem.dtype == torch.float32:
        table = _TF32_HOPPER if problem.allow_tf32 and device.is_hopper else _SINGLE
    elif device.shared_bytes < LARGE_SHARED_MEMORY:
        table = _HALF_SMALL
    else:
        table = _HALF_HOPPER if device.is_hopper and problem.bias_shape is None else _HALF
    return table[max(64, block_of(problem.D), block_of(problem.Dv))]


class Call(DeviceCall):
    """What derives one problem with inputs of given strides and alignment."""

    __slots__ = (
        *("problem", "needs", "device", "copies", "rows_shape", "is_ready"),
        *("rows", "keys", "queries", "bias", "sinks"),
        *("new_rows", "new_dq", "new_dk", "new_dv", "new_dbias", "new_dsinks"),
    )

    def __init__(self, problem: AttentionProblem, given: BackwardTensors, needs: Needs) -> None:
        self.problem, self.needs = problem, needs
        aligned = _with_aligned_inputs(given)
        self.copies = not all(map(is_, aligned, given))
        tensors, statistics, dout = aligned.inputs, aligned.statistics, aligned.dout
        self.device = dout.get_device()
        packed = problem.layout == "varlen"
        B = 1 if packed else problem.B
        self.rows_shape = (B, problem.Hq, problem.Sq, 4)
        arguments = {**_arguments(problem, tensors, dout), "H": problem.Hq, "S": problem.Sq}
        arguments |= {"stride_rb": problem.Hq * problem.Sq, "stride_rh": problem.Sq, "stride_rs": 1}
        if packed:
            arguments |= {"stride_rb": 0, "stride_rh": 1, "stride_rs": problem.Hq}
        block_rows = max(16, 8192 // arguments["BLOCK_DV"])
        row_tiles = triton.cdiv(problem.Sq, block_rows) * problem.Hq * B
        self.rows = Launch(prepare_rows, (row_tiles,), arguments | {"BLOCK_ROWS": block_rows})
        for_keys, for_queries = cuts_of(problem, device_of(dout.device))
        n_keys = _slots(problem, problem.Skv, for_keys.BLOCK_KV)
        n_queries = _slots(problem, problem.Sq, for_queries.BLOCK_Q)
        self.keys = self.queries = self.bias = self.sinks = None
        if needs.k or needs.v:
            programs = n_keys * problem.Hkv * B
            self.keys = _launch(sum_keys, programs, arguments, for_keys, n_slots=n_keys)
        if needs.q:
            programs = n_queries * problem.Hq * B
            self.queries = _launch(sum_queries, programs, arguments, for_queries, n_slots=n_queries)
        if needs.bias and tensors.bias is not None:
            self.bias = _launch_bias(arguments, tensors, for_queries)
        if needs.sinks and tensors.sinks is not None:
            more = {"B": B, "n_sequences": problem.B, "BLOCK_ROWS": SINK_ROWS}
            self.sinks = Launch(sum_sinks, (problem.Hq,), arguments | more)
        self.new_rows = allocator(self.rows_shape, statistics.dtype, dout.device)
        self.new_dq, self.new_dk, self.new_dv, self.new_dbias, self.new_dsinks = (
            None if x is None else allocator(tuple(x.shape), x.dtype, x.device) for x in tensors[:5]
        )
        self.is_ready = False

    def _run(self, given: BackwardTensors, addresses: list[int]) -> Gradients:
        if self.copies:
            # Held until the kernels are in the stream, as are rows.
            given = _with_aligned_inputs(given)
            addresses = given.addresses()
        if not self.is_ready:
            return self._first(given)
        q, k, v, bias, sinks, kv_lens, cu_q, cu_k, _, out, statistics, dout, dlse = addresses
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        rows = self.new_rows()
        of_rows = rows.data_ptr()
        # What was None when it was compiled is not looked at, and there is no scratch memory.
        self.rows.enqueue(stream, (out, dout, statistics, dlse, of_rows, 0))
        dq = dk = dv = dbias = dsinks = None
        inputs = (q, k, v, bias, kv_lens, cu_q, cu_k, dout, of_rows)
        if self.keys is not None:
            dk, dv = self.new_dk(), self.new_dv()
            self.keys.enqueue(stream, (*inputs, dk.data_ptr(), dv.data_ptr(), 0))
        if self.queries is not None:
            dq = self.new_dq()
            self.queries.enqueue(stream, (*inputs, dq.data_ptr(), 0))
        if self.bias is not None:
            dbias = self.new_dbias()
            inputs = (q, k, v, bias, kv_lens, dout, of_rows)
            self.bias.enqueue(stream, (*inputs, dbias.data_ptr(), 0))
        if self.sinks is not None:
            dsinks = self.new_dsinks()
            self.sinks.enqueue(stream, (sinks, cu_q, of_rows, dsinks.data_ptr(), 0))
        return self._wanted(dq, dk, dv, dbias, dsinks)

    def _first(self, given: BackwardTensors) -> Gradients:
        """A call that compiles, which takes tensors to see what they are."""
        q, k, v, bias, sinks, kv_lens, cu_q, cu_k, _, out, statistics, dout, dlse = given
        rows = statistics.new_empty(self.rows_shape)
        self.rows(out, dout, statistics, dlse, rows)
        dq = dk = dv = dbias = dsinks = None
        pointers = (q, k, v, bias, kv_lens, cu_q, cu_k, dout, rows)
        if self.keys is not None:
            dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
            self.keys(*pointers, dk, dv)
        if self.queries is not None:
            dq = q.new_empty(q.shape)
            self.queries(*pointers, dq)
        if self.bias is not None:
            dbias = bias.new_empty(bias.shape)
            self.bias(q, k, v, bias, kv_lens, dout, rows, dbias)
        if self.sinks is not None:
            dsinks = sinks.new_empty(sinks.shape)
            self.sinks(sinks, cu_q, rows, dsinks)
        launches = (self.rows, self.keys, self.queries, self.bias, self.sinks)
        # The interpreter compiles nothing.
        self.is_ready = all(
            launch.enqueue is not None and not launch.scratch_bytes
            for launch in launches
            if launch is not None
        )
        return self._wanted(dq, dk, dv, dbias, dsinks)

    def _wanted(
        self,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        dbias: Tensor | None,
        dsinks: Tensor | None,
    ) -> Gradients:
        # dK and dV come out of one pass; the one nobody asked for is dropped.
        needs = self.needs
        return Gradients(dq, dk if needs.k else None, dv if needs.v else None, dbias, dsinks)


def prepare_backward(
    problem: AttentionProblem, given: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    if 0 in (problem.B, problem.Sq, problem.Skv):
        return partial(_without_pairs, problem, needs)
    return Call(problem, given, needs)


def _with_aligned_inputs(given: BackwardTensors) -> BackwardTensors:
    return given._replace(
        q=_with_aligned_rows(given.q),
        k=_with_aligned_rows(given.k),
        v=_with_aligned_rows(given.v),
        dout=_with_aligned_rows(given.dout),
    )


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


def _without_pairs(
    problem: AttentionProblem, needs: Needs, given: BackwardTensors, addresses: list[int]
) -> Gradients:
    """Without rows or keys, only the sinks may have a gradient: lse is then the sink itself. Rows
    and keys that no sequence owns have NaN, as do rows of bad ones."""
    dlse = given.dlse
    grads = {
        name: torch.zeros_like(getattr(given, name), memory_format=torch.contiguous_format)
        for name in needs._fields
        if getattr(needs, name)
    }
    is_bad = given.statistics[..., 1].isnan()
    if problem.B == 0:
        for name in grads.keys() & {"q", "k", "v"}:
            grads[name].fill_(torch.nan)
    elif "q" in grads:
        grads["q"].masked_fill_(is_bad[..., None], torch.nan)
    if "sinks" in grads and dlse is not None:
        # Dim 1 holds the heads in every layout. A sink of -inf is none.
        others = [dim for dim in range(dlse.dim()) if dim != 1]
        share = dlse.sum(others, dtype=torch.float64)
        grads["sinks"].copy_(share.masked_fill(given.sinks == -torch.inf, 0.0))
    return Gradients(*map(grads.get, Gradients._fields))


def _slots(problem: AttentionProblem, S: int, block: int) -> int:
    """Tiles of a head; in a packed batch what `sequences.find_sequence` hands out."""
    return S // block + problem.B + 1 if problem.layout == "varlen" else triton.cdiv(S, block)


def _launch(
    kernel: Any, programs: int, arguments: dict[str, Any], cut: Tiles, **more: Any
) -> Launch:
    blocks = {"BLOCK_Q": cut.BLOCK_Q, "BLOCK_KV": cut.BLOCK_KV, "COPIES": copies_of(cut)}
    return Launch(kernel, (programs,), arguments | blocks | more, **cut.options)


def _launch_bias(arguments: dict[str, Any], tensors: Tensors, cut: Tiles) -> Launch:
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
        "RECIPROCAL": problem.dtype == torch.float32,
    }
