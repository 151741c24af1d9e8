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

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.kernel import Gradients, Needs
from lockstep.kernels.triton.dbias import sum_bias
from lockstep.kernels.triton.dkdv import sum_keys
from lockstep.kernels.triton.dq import sum_queries
from lockstep.kernels.triton.gradient_rows import prepare_rows, sum_sinks
from lockstep.kernels.triton.launch import FAR, scales_of, strides_of
from lockstep.kernels.triton.plan import block_of
from lockstep.problem import AttentionProblem, Tensors

SINK_ROWS = 1024


@dataclass(frozen=True)
class Cut:
    """How one pass is cut into programs. Its blocks decide the bits; the rest does not."""

    BLOCK_Q: int
    BLOCK_KV: int
    num_warps: int
    num_stages: int


# By the larger of the padded head dims: dkdv, dq. The first table needs the shared memory of a
# data-centre GPU, 163 KB a block; the second does with 99 KB.
_HALF = {
    64: (Cut(64, 64, 4, 3), Cut(64, 64, 4, 3)),
    128: (Cut(64, 128, 8, 3), Cut(128, 64, 8, 3)),
    256: (Cut(32, 64, 8, 2), Cut(64, 32, 4, 2)),
    512: (Cut(16, 32, 8, 1), Cut(32, 16, 8, 1)),
}
_HALF_SMALL = {
    64: (Cut(64, 64, 4, 2), Cut(64, 64, 4, 2)),
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
LARGE_SHARED_MEMORY = 163 * 1024


@lru_cache
def _shared_memory(device: torch.device) -> int:
    if device.type != "cuda":
        return LARGE_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def cuts_of(problem: AttentionProblem, shared_memory: int) -> tuple[Cut, Cut]:
    """The cuts for dK and dV, and for dQ."""
    table = _HALF if shared_memory >= LARGE_SHARED_MEMORY else _HALF_SMALL
    if problem.dtype == torch.float32:
        table = _SINGLE
    return table[max(64, block_of(problem.D), block_of(problem.Dv))]


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
    found = {name: _like(getattr(tensors, name)) for name in needs._fields if getattr(needs, name)}
    if 0 in (problem.B, problem.Sq, problem.Skv):
        _fill_without_pairs(found, lse, dlse)
        return Gradients(*map(found.get, Gradients._fields))
    lse2, delta = _prepare(problem, out, lse, dout, dlse)
    if "sinks" in found:
        B, Hq, S = lse2.shape
        sinks = tensors.sinks, lse2, delta, found["sinks"]
        sum_sinks[(Hq,)](*sinks, B, Hq, S, BLOCK_ROWS=SINK_ROWS)
    arguments = _arguments(problem, tensors, dout)
    pointers = *tensors[:4], *tensors[5:8], dout, lse2, delta
    for_keys, for_queries = cuts_of(problem, _shared_memory(dout.device))
    if needs.k or needs.v:
        # Both come out of one pass; the one nobody asked for is dropped.
        dk = found["k"] if needs.k else _like(tensors.k)
        dv = found["v"] if needs.v else _like(tensors.v)
        n_slots, grid = _programs(problem, problem.Skv, for_keys.BLOCK_KV, problem.Hkv)
        sum_keys[grid](*pointers, dk, dv, n_slots=n_slots, **arguments, **vars(for_keys))
    if needs.q:
        n_slots, grid = _programs(problem, problem.Sq, for_queries.BLOCK_Q, problem.Hq)
        sum_queries[grid](*pointers, found["q"], n_slots=n_slots, **arguments, **vars(for_queries))
    if needs.bias:
        _sum_bias(tensors, dout, lse2, delta, found["bias"], arguments, for_queries)
    return Gradients(*map(found.get, Gradients._fields))


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _fill_without_pairs(grads: dict[str, Tensor], lse: Tensor, dlse: Tensor | None) -> None:
    """Without rows or keys, only the sinks may have a gradient: lse is then the sink itself."""
    for grad in grads.values():
        grad.zero_()
    if "sinks" in grads and dlse is not None and lse.numel():
        # Rows without a sink either have lse -inf. Dim 1 holds the heads in every layout.
        share = dlse.masked_fill(lse == -torch.inf, 0.0)
        others = [dim for dim in range(lse.dim()) if dim != 1]
        grads["sinks"].copy_(share.sum(others, dtype=torch.float64))


def _programs(
    problem: AttentionProblem, S: int, block: int, heads: int
) -> tuple[int, tuple[int, ...]]:
    """Tiles of a head, and the grid of all. Packed sequences get one tile more each, as
    `tiles.find_sequence` says.
    """
    if problem.layout == "varlen":
        n_slots = S // block + problem.B
        return n_slots, (n_slots * heads,)
    n_slots = triton.cdiv(S, block)
    return n_slots, (n_slots * heads * problem.B,)


def _prepare(
    problem: AttentionProblem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor]:
    """lse2 and delta [B, Hq, Sq]; those of a packed batch [1, Hq, T]."""
    packed = problem.layout == "varlen"
    shape = (2, 1 if packed else problem.B, problem.Hq, problem.Sq)
    lse2, delta = torch.empty(shape, dtype=torch.float32, device=out.device).unbind()
    _, B, Hq, S = shape
    row_strides = (0, 1, Hq) if packed else (Hq * S, S, 1)
    block_dv = block_of(problem.Dv)
    block_rows = max(16, 8192 // block_dv)
    prepare_rows[(triton.cdiv(S, block_rows) * Hq * B,)](
        *(out, dout, lse, dlse, lse2, delta),
        *_dout_strides(problem, dout),
        *row_strides,
        *(S, Hq),
        DV=problem.Dv,
        BLOCK_DV=block_dv,
        BLOCK_ROWS=block_rows,
    )
    return lse2, delta


def _dout_strides(problem: AttentionProblem, dout: Tensor) -> tuple[int, int, int]:
    """By sequence, head and token."""
    if problem.layout == "varlen":
        return 0, dout.stride(1), dout.stride(0)
    return dout.stride(0), dout.stride(1), dout.stride(2)


def _arguments(problem: AttentionProblem, tensors: Tensors, dout: Tensor) -> dict[str, Any]:
    """What all passes take besides pointers, tiles and blocks."""
    strides = strides_of(problem, tensors)
    strides = {name: strides[name] for name in strides if name[7] in "qkvb"}
    of_dout = zip("bhs", _dout_strides(problem, dout), strict=True)
    strides |= {f"stride_o{letter}": stride for letter, stride in of_dout}
    # Rows start at multiples of `align` elements, 16 bytes at most.
    wide = [name for name in strides if name[7] in "qkvo"]
    size = dout.element_size()
    starts = (x.data_ptr() // size for x in (*tensors[:3], dout))
    align = math.gcd(16 // size, *(strides[name] for name in wide), *starts)
    strides |= {name: strides[name] // align for name in wide}
    left, right = problem.window
    scales = scales_of(problem)
    del scales["SCALE_LATER"]
    return {
        **strides,
        **{name: getattr(problem, name) for name in ("B", "Hq", "Sq", "Skv")},
        "left": FAR if left is None else min(left, FAR),
        "right": FAR if right is None else min(right, FAR),
        "scale": problem.scale,
        **scales,
        "D": problem.D,
        "DV": problem.Dv,
        "GROUP": problem.Hq // problem.Hkv,
        "ALIGN": align,
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
        "BLOCK_D": block_of(problem.D),
        "BLOCK_DV": block_of(problem.Dv),
    }


def _sum_bias(
    tensors: Tensors,
    dout: Tensor,
    lse2: Tensor,
    delta: Tensor,
    dbias: Tensor,
    arguments: dict[str, Any],
    cut: Cut,
) -> None:
    B, Hq, Sq, Skv = dbias.shape
    programs = B * Hq * triton.cdiv(Sq, cut.BLOCK_Q) * triton.cdiv(Skv, cut.BLOCK_KV)
    sum_bias[(programs,)](
        *(*tensors[:4], tensors.kv_lens, dout, lse2, delta, dbias),
        **{name: value for name, value in arguments.items() if name != "scale"},
        bias_B=B,
        bias_Hq=Hq,
        bias_Sq=Sq,
        bias_Skv=Skv,
        SHARED_Q=Sq < arguments["Sq"],
        SHARED_KV=Skv < arguments["Skv"],
        **vars(cut),
    )
