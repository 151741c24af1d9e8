"""From a problem to a launch: tensor maps, sizes, and compiled kernels kept at hand."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper.forward import forward_kernel
from lockstep.kernels.hopper.gluon_shim import TensorDescriptor, gl
from lockstep.kernels.hopper.plan import (
    REGISTERS,
    ROWS,
    Plan,
    padded,
    pays_to_pair,
    plan_of,
)
from lockstep.kernels.hopper.schedule import RAGGED
from lockstep.numerics import LOG2E
from lockstep.problem import AttentionProblem, Tensors

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}
# Tensor maps count in int32, and strides of 2^34 elements vanish modulo 2^64 bytes in RAGGED steps.
_FAR, _WRAP = 0x7FFF0000, 1 << 34
_ALIGNMENT = 8  # elements: the copy engine takes addresses in multiples of 16 bytes

_compiled: dict[tuple[Any, ...], Any] = {}


def forward(problem: AttentionProblem, tensors: Tensors) -> tuple[Tensor, Tensor]:
    """(out, lse) of a problem that `supports` lets through."""
    q = tensors.q
    out = q.new_empty(problem.out_shape)
    lse = q.new_empty(problem.lse_shape, dtype=torch.float32)
    if not out.numel():
        return out, lse
    if not problem.Skv:
        return out.zero_(), _without_keys(lse, problem, tensors.sinks)
    plan = plan_of(problem)
    arguments, constants = arguments_of(problem, tensors, out, lse, processors(q.device))
    _launch(q.device, arguments, constants, plan)
    return out, lse


def _without_keys(lse: Tensor, problem: AttentionProblem, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return lse.fill_(-math.inf)
    return lse.copy_(sinks if problem.layout == "varlen" else sinks[:, None])


def _launch(
    device: torch.device, arguments: tuple[Any, ...], constants: tuple[Any, ...], plan: Plan
) -> None:
    key = (device, *constants, *(x.dtype for x in arguments if isinstance(x, Tensor)))
    tiles = arguments[_N_Q_TILES] * arguments[_N_Q_TILES + 1]
    grid = (min(processors(device), tiles), 1, 1)
    with torch.cuda.device(device):
        kernel = _compiled.get(key)
        if kernel is not None:
            kernel[grid](*arguments, *constants)
        else:
            _compiled[key] = forward_kernel[grid](
                *arguments, *constants, num_warps=4, maxnreg=REGISTERS[plan.consumers][0]
            )


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


_N_Q_TILES = 16  # where n_q_tiles stands among the arguments of forward_kernel, then heads


def arguments_of(
    problem: AttentionProblem, tensors: Tensors, out: Tensor, lse: Tensor, n_processors: int
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """What `forward_kernel` takes: arguments, then constants."""
    plan = plan_of(problem)
    packed = problem.layout == "varlen"
    layout = "varlen" if packed else "kv_lens" if problem.has_kv_lens else "dense"
    q, k, v = (_by_head(x, packed) for x in tensors[:3])
    q = _fit(q)
    k, v, kv_batch_rows = _fit_keys(k, v, ragged=layout != "dense")
    width, width_v = padded(problem.D), padded(problem.Dv)
    maps = (
        _map(q, ROWS, width, packed),
        _map(k, plan.block_kv, width, layout != "dense"),
        _map(v, plan.block_kv, width_v, layout != "dense"),
        _map(_by_head(out, packed), ROWS, width_v, packed),
    )
    B, Hq, Sq = problem.B, problem.Hq, problem.Sq
    left, right = problem.window
    if packed:
        heads, n_q_tiles = Hq, Sq // plan.block_q + B
        row_strides = (0, 1, Hq)
    else:
        heads, n_q_tiles = B * Hq, -(-Sq // plan.block_q)
        row_strides = (Hq * Sq, Sq, 1)
    paired = right is not None and left is None and not packed
    paired = paired and pays_to_pair(heads, n_q_tiles, n_processors)
    scores, scale, cap_log2 = _scales(problem)
    unused = lse
    arguments = (
        *maps,
        out,
        lse,
        unused if tensors.sinks is None else tensors.sinks,
        unused if tensors.cu_seqlens_q is None else tensors.cu_seqlens_q,
        unused if tensors.cu_seqlens_k is None else tensors.cu_seqlens_k,
        unused if tensors.kv_lens is None else tensors.kv_lens,
        scale,
        cap_log2,
        *row_strides,
        int(paired),
        n_q_tiles,
        heads,
        Hq,
        Hq // problem.Hkv,
        B,
        Sq,
        problem.Skv,
        left or 0,
        right or 0,
        kv_batch_rows,
    )
    constants = (
        layout,
        left is not None,
        right is not None,
        scores,
        problem.has_sinks,
        problem.Dv,
        plan.consumers,
        plan.stages,
        plan.turns,
        # bf16 weights have the exponents of fp32; fp16 weights would overflow.
        problem.dtype == torch.bfloat16,
        width == width_v == 256,
        *REGISTERS[plan.consumers][1:],
    )
    return arguments, constants


def _scales(problem: AttentionProblem) -> tuple[str, float, float]:
    """How scores become log2 units: see `forward.score`."""
    if problem.softcap is not None:
        return "capped", problem.scale / problem.softcap, problem.softcap * LOG2E
    scale = problem.scale * LOG2E
    return ("raw" if scale > 0 else "scaled"), scale, 0.0


def _by_head(x: Tensor, packed: bool) -> Tensor:
    """[B, H, S, D] as it is; [T, H, D] as [1, H, T, D]."""
    return x.transpose(0, 1)[None] if packed else x


def _fit(x: Tensor) -> Tensor:
    """x [B, H, S, D] if the copy engine takes its strides and address, else a copy."""
    takes = x.data_ptr() % 16 == 0 and all(
        size == 1 or (stride > 0 and stride % _ALIGNMENT == 0)
        for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    )
    return x if takes else x.clone(memory_format=torch.contiguous_format)


def _fit_keys(k: Tensor, v: Tensor, ragged: bool) -> tuple[Tensor, Tensor, int]:
    """k, v, and for ragged maps the rows from one batch to the next, which both have to share."""
    k, v = _fit(k), _fit(v)
    if not ragged or k.shape[0] == 1:
        return k, v, 0
    steps = {x.stride(0) / x.stride(2) if x.shape[2] > 1 else 0.5 for x in (k, v)}
    if len(steps) == 1 and (step := steps.pop()).is_integer():
        return k, v, int(step)
    k, v = (x.clone(memory_format=torch.contiguous_format) for x in (k, v))
    return k, v, k.shape[1] * k.shape[2]


def _map(x: Tensor, rows: int, width: int, ragged: bool) -> TensorDescriptor:
    """The tensor map of x [B, H, S, D] in tiles [rows, width]: see `schedule` for ragged ones."""
    B, H, S, D = x.shape
    # The stride of a dim of size 1 means nothing and may be anything.
    sb, sh, ss = (
        stride if size > 1 else _ALIGNMENT
        for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    )
    if S == 1:
        ss = -(-D // _ALIGNMENT) * _ALIGNMENT
    if ragged:
        shape, strides = [_FAR, _FAR, H, RAGGED.value, D], [_WRAP - ss, ss, sh, ss, 1]
    else:
        shape, strides = [1, B, H, S, D], [_ALIGNMENT, sb, sh, ss, 1]
    return TensorDescriptor(
        x, shape, strides, [1, 1, 1, rows, width], _tile_layout(x.dtype, rows, width)
    )


@lru_cache(maxsize=64)
def _tile_layout(dtype: torch.dtype, rows: int, width: int) -> Any:
    return gl.NVMMASharedLayout.get_default_for([1, 1, 1, rows, width], GLUON_DTYPES[dtype])
