"""Gradients on Hopper GPUs for head dims from 129 to 256: two passes, seven products.

    backward_call           what it shares with the backward of narrow heads
    backward_rows           m, log2 l and delta of each row    one short launch
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

from lockstep.kernels.allocate import allocator
from lockstep.kernels.hopper.backward_call import (
    SINKS,
    Call,
    Cut,
    Launched,
    constants_of,
    cut_into,
    raggedness,
    scales_of,
    sizes_of,
    slots_of,
)
from lockstep.kernels.hopper.backward_products import ROWS
from lockstep.kernels.hopper.backward_wide_keys import keys_kernel
from lockstep.kernels.hopper.backward_wide_queries import queries_kernel
from lockstep.kernels.hopper.backward_wide_sight import BLOCK_Q as QUERIES
from lockstep.kernels.hopper.backward_wide_tiles import CHUNK
from lockstep.kernels.hopper.copy_engine import flat_map, tensor_map
from lockstep.kernels.kernel import Given, Gradients, Needs
from lockstep.problem import AttentionProblem, Tensors

BLOCK = ROWS.value  # queries and keys of a tile; programs of the second pass own two tiles of rows
BLOCK_Q = QUERIES.value
# Registers of a thread when a program starts; its partitions then share them out anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
SHARED_BYTES = 227 * 1024


def cut_of(problem: AttentionProblem) -> Cut:
    """Tiles of the first pass, whose query tiles are those of the statistics."""
    return cut_into(problem, 256, BLOCK, BLOCK)


class WideCall(Call):
    """`Kernel.prepare_backward`"""

    def __init__(self, problem: AttentionProblem, given: Given, needs: Needs) -> None:
        super().__init__(problem, given, needs, cut_of(problem))
        shape = (self.cut.n_tiles, 4, BLOCK)
        self.new_stats = allocator(shape, torch.float32, self.where)

    def derive(
        self, tensors: Tensors, out: Tensor, statistics: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Gradients, tuple[Launched | None, ...]]:
        problem, cut, needs = self.problem, self.cut, self.needs
        stats, dq, dk, dv = self.new_stats(), None, None, None
        rows = self.prepare_statistics(tensors, (out, statistics, dout, dlse), stats, num_warps=8)
        keys = queries = None
        if needs.k or needs.v:
            dk, dv = self.new_dk(), self.new_dv()
            arguments, constants = keys_arguments(problem, tensors, dout, stats, dk, dv, cut)
            keys = self.launch(keys_kernel, (cut.programs, 1, 1), arguments, constants, **OPTIONS)
        if needs.q:
            dq = self.new_dq()
            arguments, constants = queries_arguments(problem, tensors, dout, stats, dq, cut)
            programs = slots_of(problem, problem.Sq, BLOCK_Q) * cut.sequences * problem.Hq
            queries = self.launch(queries_kernel, (programs, 1, 1), arguments, constants, **OPTIONS)
        return self.wanted(dq, dk, dv, tensors.sinks, stats), (rows, keys, queries)

    def again(self, stream: int, given: Given, addresses: list[int]) -> Gradients:
        q, k, v, _, _, kv_lens, cu_q, cu_k, _, out, statistics, dout, dlse = addresses
        rows, keys, queries = self.launchers
        stats, dq, dk, dv = self.new_stats(), None, None, None
        of_stats = stats.data_ptr()
        # In the order of their arguments, and no scratch memory.
        rows(stream, (out, dout, statistics, dlse, of_stats, 0, 0, 0, 0, cu_q, cu_k, 0))
        if keys is not None:
            dk, dv = self.new_dk(), self.new_dv()
            maps = (q, dout, of_stats, k, v, dk.data_ptr(), dv.data_ptr())
            keys(stream, (cu_q, cu_k, kv_lens, 0), maps)
        if queries is not None:
            dq = self.new_dq()
            maps = (q, dout, k, v, dq.data_ptr())
            queries(stream, (of_stats, cu_q, cu_k, kv_lens, 0), maps)
        return self.wanted(dq, dk, dv, given[SINKS], stats)

    def row_statistics(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        cut = self.cut
        m, delta, log2_l, _ = memory.view(cut.sequences, cut.Hq, cut.q_slots, 4, BLOCK).unbind(3)
        return m.double() * self.problem.score_unit + log2_l, delta


def keys_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    stats: Tensor,
    dk: Tensor,
    dv: Tensor,
    cut: Cut,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and compile-time constants of `keys_kernel`."""
    packed, ragged_kv = raggedness(problem)
    block = [1, 1, 1, BLOCK, CHUNK.value]
    n_heads = cut.sequences * problem.Hkv
    arguments = (
        tensor_map(tensors.q, block, packed, packed),
        tensor_map(dout, block, packed, packed),
        flat_map(stats.view(-1), [4 * BLOCK]),
        tensor_map(tensors.k, block, packed, ragged_kv),
        tensor_map(tensors.v, block, packed, ragged_kv),
        tensor_map(dk, block, packed, packed),
        tensor_map(dv, block, packed, packed),
        *(tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens, *scales_of(problem)),
        *(cut.kv_slots, cut.q_slots, n_heads, problem.Hkv, problem.Hq // problem.Hkv),
        *sizes_of(problem, tensors.k),
    )
    return arguments, {**_chunks(problem), **constants_of(problem, BLOCK)}


def queries_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    stats: Tensor,
    dq: Tensor,
    cut: Cut,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of `queries_kernel`."""
    packed, ragged_kv = raggedness(problem)
    q_block, kv_block = [1, 1, 1, BLOCK_Q, CHUNK.value], [1, 1, 1, BLOCK, CHUNK.value]
    arguments = (
        tensor_map(tensors.q, q_block, packed, packed),
        tensor_map(dout, q_block, packed, packed),
        tensor_map(tensors.k, kv_block, packed, ragged_kv),
        tensor_map(tensors.v, kv_block, packed, ragged_kv),
        tensor_map(dq, q_block, packed, packed),
        *(stats, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens, *scales_of(problem)),
        *(slots_of(problem, problem.Sq, BLOCK_Q), cut.q_slots, problem.Hq),
        *(problem.Hq // problem.Hkv, *sizes_of(problem, tensors.k)),
    )
    return arguments, {**_chunks(problem), **_stages(problem), **constants_of(problem, BLOCK)}


def _stages(problem: AttentionProblem) -> dict[str, int]:
    """How many key tiles of the second pass may be under way. Values are read once, keys once more
    a product later: they get the second stage first."""
    nd, ndv = _chunks(problem).values()
    free = SHARED_BYTES // (2 * BLOCK * CHUNK.value) - 2 * (nd + ndv)
    v_stages = min(2, (free - 2 * nd) // ndv)
    return {"K_STAGES": min(3, (free - v_stages * ndv) // nd), "V_STAGES": v_stages}


def _chunks(problem: AttentionProblem) -> dict[str, int]:
    nd, ndv = (triton.cdiv(D, CHUNK.value) for D in (problem.D, problem.Dv))
    return {"ND": nd, "NDV": ndv}
