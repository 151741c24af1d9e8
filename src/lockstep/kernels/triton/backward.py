"""Gradients on the GPU, without atomics: every sum has one owner and one order.

    gradient_rows   m, l and delta of every row; dsinks       one launch, one more for sinks
    terms           float32 as sums of bf16                   only where tensor cores make of those
                                                              products of float32
    dkdv            dK and dV, by key tile                    four products per tile
    dq              dQ, by query tile                         three products per tile
    dbias           the bias, by tile of the bias             only if wanted

Seven products where one pass would do with five; but a single pass has to add dQ from many blocks,
in an order that either varies or is waited for. The scores are computed again in each pass, so
memory stays linear in the sequence.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial
from operator import is_
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.hardware import SHARED_BYTES
from lockstep.kernels.finish_gradients import gradients_from
from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs, PreparedBackward
from lockstep.kernels.launch import Buffer, Launch, Launches, taken_by
from lockstep.kernels.triton.dbias import sum_bias
from lockstep.kernels.triton.dkdv import sum_keys
from lockstep.kernels.triton.dq import sum_queries
from lockstep.kernels.triton.gradient_rows import prepare_rows, sum_sinks
from lockstep.kernels.triton.launch import (
    bias_strides,
    device_of,
    result_strides,
    row_strides,
    scales_of,
    slope_stride,
    stride_arguments,
    units_of,
    window_of,
)
from lockstep.kernels.triton.plan import Device, Tiles, block_of, blocks_of, precision_of
from lockstep.kernels.triton.terms import NAMES, UNIT, buffers_of, launch_cut, strides_of
from lockstep.memory_order import empty_like, is_tokens_first, zeros_like
from lockstep.problem import AttentionProblem

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
# Tensor cores take float32 for tf32, and need larger tiles.
_TF32_HOPPER = {
    **_SINGLE,
    64: (Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
    128: (Tiles(32, 64, 8, 2), Tiles(64, 32, 8, 2)),
}
# Six products of bf16 for one of float32: three terms of each factor lie in shared memory.
_BF16X6 = {
    **_SINGLE,
    64: (Tiles(64, 64, 4, 1), Tiles(64, 64, 4, 1)),
    128: (Tiles(32, 64, 4, 2), Tiles(64, 32, 4, 2)),
}


def copies_of(cut: Tiles) -> int:
    """How many copies `gradient_tiles.load_pair` makes: 2 if there are then as many elements as
    threads."""
    return 2 if 32 * cut.num_warps == 4 * cut.BLOCK_Q else 1


def cuts_of(problem: AttentionProblem, device: Device) -> tuple[Tiles, Tiles]:
    """The cuts for dK and dV, and for dQ."""
    if problem.dtype == torch.float32:
        precision = precision_of(problem, device)
        table = _BF16X6 if precision == "bf16x6" else _SINGLE
        if precision == "tf32" and device.is_hopper:
            table = _TF32_HOPPER
    elif device.shared_bytes < SHARED_BYTES:
        table = _HALF_SMALL
    else:
        table = _HALF_HOPPER if device.is_hopper and problem.bias_shape is None else _HALF
    return table[max(64, block_of(problem.D), block_of(problem.Dv))]


def backward_launches(problem: AttentionProblem, given: BackwardTensors, needs: Needs) -> Launches:
    """The launches that compute the gradients of one problem with inputs of given strides and
    alignment."""
    aligned = with_aligned_inputs(given)
    # One pass makes both dK and dV.
    both = needs.k or needs.v
    made = needs._replace(k=both, v=both)
    results = {
        f"d{name}": Buffer.like(x, tuple(x.shape), x.dtype)
        if name in "qkv"
        else Buffer(tuple(x.shape), x.dtype)
        for name in Gradients._fields
        if getattr(made, name) and (x := getattr(given, name)) is not None
    }
    rows = Buffer((_sequences(problem), problem.Hq, problem.Sq, 4), given.statistics.dtype)
    return Launches(
        given.dout.device,
        BackwardTensors._fields,
        results,
        {"rows": rows, **terms_of(problem, device_of(given.dout.device))},
        _launches(problem, aligned, results.keys()),
        fit=None if all(map(is_, aligned, given)) else with_aligned_inputs,
        finish=gradients_from(results, needs),
    )


def _launches(
    problem: AttentionProblem, given: BackwardTensors, wanted: Collection[str]
) -> list[Launch]:
    """The launches that compute the gradients that are wanted, by name."""
    arguments = arguments_of(problem, given)
    found = [launch_rows(problem, arguments)]
    if terms_of(problem, device_of(given.dout.device)):
        found.append(launch_cut(problem, arguments))
    if "dk" in wanted:
        found.append(launch_keys(problem, given, absent=("dk_sums", "dv_sums")))
    if "dq" in wanted:
        found.append(launch_queries(problem, given, absent=("dq_sums",)))
    if "dbias" in wanted:
        found.append(_launch_bias(problem, given))
    if "dsinks" in wanted:
        found.append(launch_sinks(problem))
    return found


def launch_rows(problem: AttentionProblem, arguments: dict[str, Any]) -> Launch:
    block_rows = max(16, 8192 // arguments["BLOCK_DV"])
    tiles = triton.cdiv(problem.Sq, block_rows) * problem.Hq * _sequences(problem)
    return _launch(prepare_rows, tiles, arguments | {"BLOCK_ROWS": block_rows})


def terms_of(problem: AttentionProblem, device: Device) -> dict[str, Buffer]:
    """The terms of float32 tensors that the passes load instead of them, by name; or none."""
    return buffers_of(problem) if precision_of(problem, device) == "bf16x6" else {}


def launch_keys(
    problem: AttentionProblem, given: BackwardTensors, absent: Collection[str]
) -> Launch:
    cut, _ = cuts_of(problem, device_of(given.dout.device))
    slots = _slots(problem, problem.Skv, cut.BLOCK_KV)
    programs = slots * problem.Hkv * _sequences(problem)
    arguments = {**_pass_arguments(problem, given), **_blocks(cut), "n_slots": slots}
    return _launch(sum_keys, programs, arguments, cut.options, absent)


def launch_queries(
    problem: AttentionProblem, given: BackwardTensors, absent: Collection[str]
) -> Launch:
    _, cut = cuts_of(problem, device_of(given.dout.device))
    slots = _slots(problem, problem.Sq, cut.BLOCK_Q)
    programs = slots * problem.Hq * _sequences(problem)
    arguments = {**_pass_arguments(problem, given), **_blocks(cut), "n_slots": slots}
    return _launch(sum_queries, programs, arguments, cut.options, absent)


def launch_sinks(problem: AttentionProblem) -> Launch:
    arguments = {
        **units_of(problem),
        "B": _sequences(problem),
        "H": problem.Hq,
        "S": problem.Sq,
        "n_sequences": problem.B,
        "BLOCK_ROWS": SINK_ROWS,
        "RECIPROCAL": problem.dtype == torch.float32,
    }
    absent = () if problem.layout == "varlen" else ("cu_seqlens_q",)
    return _launch(sum_sinks, problem.Hq, arguments, absent=absent)


def _launch_bias(problem: AttentionProblem, given: BackwardTensors) -> Launch:
    assert given.bias is not None
    _, cut = cuts_of(problem, device_of(given.dout.device))
    sizes = dict(zip(("bias_B", "bias_Hq", "bias_Sq", "bias_Skv"), given.bias.shape, strict=True))
    tiles = triton.cdiv(sizes["bias_Sq"], cut.BLOCK_Q)
    tiles *= triton.cdiv(sizes["bias_Skv"], cut.BLOCK_KV)
    shared = {
        "SHARED_Q": sizes["bias_Sq"] < problem.Sq,
        "SHARED_KV": sizes["bias_Skv"] < problem.Skv,
    }
    programs = sizes["bias_B"] * sizes["bias_Hq"] * tiles
    arguments = {**_pass_arguments(problem, given), **_blocks(cut), **sizes, **shared}
    return _launch(sum_bias, programs, arguments, cut.options)


def _launch(
    kernel: Any,
    programs: int,
    arguments: dict[str, Any],
    options: dict[str, int] | None = None,
    absent: Collection[str] = (),
) -> Launch:
    """A launch that takes what it can use of `arguments`."""
    taken = taken_by(kernel, arguments)
    names = NAMES if taken.get("PRECISION") == "terms" else None
    return Launch(kernel, (programs,), taken, names=names, absent=absent, **(options or {}))


def _sequences(problem: AttentionProblem) -> int:
    """Packed sequences count as one."""
    return 1 if problem.layout == "varlen" else problem.B


def _blocks(cut: Tiles) -> dict[str, int]:
    return {"BLOCK_Q": cut.BLOCK_Q, "BLOCK_KV": cut.BLOCK_KV, "COPIES": copies_of(cut)}


def prepare_backward(
    problem: AttentionProblem, given: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    if 0 in (problem.B, problem.Sq, problem.Skv):
        return partial(_without_pairs, problem, needs)
    return backward_launches(problem, given, needs)


def with_aligned_inputs(given: BackwardTensors) -> BackwardTensors:
    """Tensors as the passes take them, or copies."""
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
    return empty_like(x, (*x.shape[:-1], -(-D // unit) * unit))[..., :D].copy_(x)


def _without_pairs(
    problem: AttentionProblem, needs: Needs, given: BackwardTensors, addresses: list[int]
) -> Gradients:
    """Without rows or keys, only the sinks may have a gradient: lse is then the sink itself. Rows
    and keys that no sequence owns have NaN, as do rows of bad ones."""
    dlse = given.dlse
    grads = {
        name: zeros_like(x)
        if name in "qkv"
        else torch.zeros_like(x, memory_format=torch.contiguous_format)
        for name in needs._fields
        if getattr(needs, name) and (x := getattr(given, name)) is not None
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
    """Tiles of a head; in a packed batch, the slots of `sequences.find_sequence`."""
    return S // block + problem.B + 1 if problem.layout == "varlen" else triton.cdiv(S, block)


def _pass_arguments(problem: AttentionProblem, given: BackwardTensors) -> dict[str, Any]:
    """The arguments of the passes besides pointers, tiles and blocks; those of terms if there are
    any."""
    arguments, device = arguments_of(problem, given), device_of(given.dout.device)
    if not terms_of(problem, device):
        return arguments
    return {
        **arguments,
        **stride_arguments(strides_of(problem), UNIT),
        "ALIGN": UNIT,
        "PRECISION": "terms",
        # Terms are tiles of 16 bits.
        "BLOCK_D": block_of(problem.D, device.least_block),
        "BLOCK_DV": block_of(problem.Dv, device.least_block),
    }


def arguments_of(problem: AttentionProblem, given: BackwardTensors) -> dict[str, Any]:
    """The arguments of the kernels besides pointers, tiles and blocks, for the tensors as they
    are."""
    dout = given.dout
    of_dout = dout.stride()[:3]
    if problem.layout == "varlen":
        of_dout = (0, dout.stride(1), dout.stride(0))
    # Rows start at multiples of 16 bytes.
    align = 16 // dout.element_size()
    device = device_of(dout.device)
    BLOCK_D, BLOCK_DV = blocks_of(problem, device)
    return {
        **stride_arguments(row_strides(problem, given.inputs) | {"o": of_dout}, align),
        **stride_arguments({"r": result_strides(problem, given.q)}),
        **{f"{x.upper()}_TOKENS_FIRST": is_tokens_first(getattr(given, x)) for x in "qkv"},
        **bias_strides(given.bias),
        "stride_ab": slope_stride(given.alibi_slopes),
        **{name: getattr(problem, name) for name in ("B", "Hq", "Sq", "Skv", "scale", "D")},
        **scales_of(problem, precision_of(problem, device)),
        **window_of(problem),
        "H": problem.Hq,
        "S": problem.Sq,
        "DV": problem.Dv,
        "GROUP": problem.Hq // problem.Hkv,
        "ALIGN": align,
        "BLOCK_D": BLOCK_D,
        "BLOCK_DV": BLOCK_DV,
        "RECIPROCAL": problem.dtype == torch.float32,
        # So that a shard's gradients are those of the whole sequence: `lockstep.distributed`.
        "ASCENDING": problem.query_invariant,
    }
