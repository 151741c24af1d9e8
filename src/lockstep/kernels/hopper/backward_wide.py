"""Gradients on Hopper GPUs for head dims from 129 to 256: two passes, seven products.

    backward_rows           lse2 and delta of each row    one short launch
    backward_wide_keys      dK and dV, by key tile        four products per tile
    backward_wide_queries   dQ, by query tile             three products per tile
    backward_wide_sight     which keys that tile sees
    backward_wide_tiles     what both are made of

dK and dV of a key add up query heads and query tiles in ascending order, dQ of a row key tiles.
Tiles start at multiples of their size, counted in the own sequence. So no bit depends on the batch,
on the GPU or on how a launch happens to run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.hopper import backward as narrow
from lockstep.kernels.hopper.backward_rows import prepare_rows
from lockstep.kernels.hopper.backward_wide_keys import keys_kernel
from lockstep.kernels.hopper.backward_wide_queries import queries_kernel
from lockstep.kernels.hopper.backward_wide_sight import BLOCK_Q as QUERIES
from lockstep.kernels.hopper.backward_wide_tiles import CHUNK, ROWS
from lockstep.kernels.hopper.copy_engine import (
    ALIGNMENT,
    batch_rows,
    copy,
    fit,
    flat_map,
    strides_of,
    tensor_map,
)
from lockstep.kernels.kernel import Gradients, Needs
from lockstep.numerics import LOG2E
from lockstep.problem import AttentionProblem, Tensors

BLOCK = ROWS.value  # queries and keys of a tile; programs of the second pass own two tiles of rows
BLOCK_Q = QUERIES.value
# Registers of a thread when a program starts; its partitions then share them out anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
SHARED_BYTES = 227 * 1024


def cut_of(problem: AttentionProblem) -> narrow.Cut:
    """Tiles of the first pass, whose query tiles are those of the statistics."""
    q_slots, kv_slots = (_slots(problem, S, BLOCK) for S in (problem.Sq, problem.Skv))
    sequences = 1 if problem.layout == "varlen" else problem.B
    return narrow.Cut(256, BLOCK, q_slots, kv_slots, sequences, problem.Hq, problem.Hkv)


def _slots(problem: AttentionProblem, S: int, block: int) -> int:
    return S // block + problem.B if problem.layout == "varlen" else triton.cdiv(S, block)


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
    q, k, v, dout = (fit(x) for x in (*tensors[:3], dout))
    if tensors.kv_lens is not None and (not batch_rows(k) or batch_rows(k) != batch_rows(v)):
        k, v = copy(k), copy(v)
    tensors = tensors._replace(q=q, k=k, v=v)
    cut = cut_of(problem)
    stats = torch.empty((cut.n_tiles, 2, BLOCK), dtype=torch.float32, device=q.device)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    packed = problem.layout == "varlen"
    row_strides = (0, 1, problem.Hq) if packed else (problem.Hq * problem.Sq, problem.Sq, 1)
    narrow.launch(
        prepare_rows,
        (cut.n_tiles, 1, 1),
        (
            *(out, dout, lse, dlse, stats, None, None, tensors.cu_seqlens_q, tensors.cu_seqlens_k),
            *(stride // ALIGNMENT for stride in strides_of(dout, packed)),
            *(*row_strides, problem.Hq, problem.B, problem.Sq, problem.Skv, cut.q_slots),
        ),
        {"ALIGN": ALIGNMENT, "DV": problem.Dv, "BLOCK_D": cut.block_d, "BLOCK_Q": BLOCK},
        num_warps=8,
    )
    if needs.k or needs.v:
        arguments, constants = keys_arguments(problem, tensors, dout, stats, dk, dv, cut)
        narrow.launch(keys_kernel, (cut.programs, 1, 1), arguments, constants, **OPTIONS)
    if needs.q:
        arguments, constants = queries_arguments(problem, tensors, dout, stats, dq, cut)
        programs = _slots(problem, problem.Sq, BLOCK_Q) * cut.sequences * problem.Hq
        narrow.launch(queries_kernel, (programs, 1, 1), arguments, constants, **OPTIONS)
    return Gradients(
        q=dq if needs.q else None,
        k=dk if needs.k else None,
        v=dv if needs.v else None,
        bias=None,
        sinks=narrow.sink_gradient(tensors.sinks, stats, cut) if needs.sinks else None,
    )


def keys_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    stats: Tensor,
    dk: Tensor,
    dv: Tensor,
    cut: narrow.Cut,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and compile-time constants of `keys_kernel`."""
    packed, ragged_kv = _raggedness(problem, tensors)
    block = [1, 1, 1, BLOCK, CHUNK.value]
    n_heads = cut.sequences * problem.Hkv
    arguments = (
        tensor_map(tensors.q, block, packed, packed),
        tensor_map(dout, block, packed, packed),
        flat_map(stats.view(-1), [2 * BLOCK]),
        tensor_map(tensors.k, block, packed, ragged_kv),
        tensor_map(tensors.v, block, packed, ragged_kv),
        tensor_map(dk, block, packed, packed),
        tensor_map(dv, block, packed, packed),
        *(tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens, *_scales(problem)),
        *(cut.kv_slots, cut.q_slots, n_heads, problem.Hkv, problem.Hq // problem.Hkv),
        *_sizes(problem, tensors),
    )
    return arguments, {**_chunks(problem), **_constants(problem, tensors)}


def queries_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    stats: Tensor,
    dq: Tensor,
    cut: narrow.Cut,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of `queries_kernel`."""
    packed, ragged_kv = _raggedness(problem, tensors)
    q_block, kv_block = [1, 1, 1, BLOCK_Q, CHUNK.value], [1, 1, 1, BLOCK, CHUNK.value]
    arguments = (
        tensor_map(tensors.q, q_block, packed, packed),
        tensor_map(dout, q_block, packed, packed),
        tensor_map(tensors.k, kv_block, packed, ragged_kv),
        tensor_map(tensors.v, kv_block, packed, ragged_kv),
        tensor_map(dq, q_block, packed, packed),
        *(stats, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens, *_scales(problem)),
        *(_slots(problem, problem.Sq, BLOCK_Q), cut.q_slots, problem.Hq),
        *(problem.Hq // problem.Hkv, *_sizes(problem, tensors)),
    )
    return arguments, {**_chunks(problem), **_stages(problem), **_constants(problem, tensors)}


def _stages(problem: AttentionProblem) -> dict[str, int]:
    """How many key tiles of the second pass may be under way. Values are read once, keys once more
    a product later: they get the second stage first."""
    nd, ndv = _chunks(problem).values()
    free = SHARED_BYTES // (2 * BLOCK * CHUNK.value) - 2 * (nd + ndv)
    v_stages = min(2, (free - 2 * nd) // ndv)
    return {"K_STAGES": min(3, (free - v_stages * ndv) // nd), "V_STAGES": v_stages}


def _raggedness(problem: AttentionProblem, tensors: Tensors) -> tuple[bool, bool]:
    """Whether queries, and whether keys, are clipped to those of a sequence."""
    packed = problem.layout == "varlen"
    return packed, packed or tensors.kv_lens is not None


def _scales(problem: AttentionProblem) -> tuple[float, float, float]:
    return problem.scale, problem.scale * LOG2E, (problem.softcap or 0.0) * LOG2E


def _sizes(problem: AttentionProblem, tensors: Tensors) -> tuple[int, ...]:
    kv_batch_rows = 0 if tensors.kv_lens is None else batch_rows(tensors.k)
    return problem.B, problem.Sq, problem.Skv, *narrow.reach(problem), kv_batch_rows


def _chunks(problem: AttentionProblem) -> dict[str, int]:
    nd, ndv = (triton.cdiv(D, CHUNK.value) for D in (problem.D, problem.Dv))
    return {"ND": nd, "NDV": ndv}


def _constants(problem: AttentionProblem, tensors: Tensors) -> dict[str, Any]:
    packed, ragged_kv = _raggedness(problem, tensors)
    return {
        "LAYOUT": "varlen" if packed else "kv_lens" if ragged_kv else "dense",
        **narrow.masks(problem),
        "HAS_EDGE": ragged_kv or problem.Skv % BLOCK != 0,
        "CAPPED": problem.softcap is not None,
        "HIDES_SCORES": problem.softcap is None and problem.scale > 0,
    }
