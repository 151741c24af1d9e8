"""From a problem of wide heads to the launches of its backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.allocate import allocator
from lockstep.kernels.hopper.backward.call import (
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
from lockstep.kernels.hopper.backward.wide.key_loop import BLOCK_Q as QUERIES
from lockstep.kernels.hopper.backward.wide.keys import keys_kernel
from lockstep.kernels.hopper.backward.wide.queries import queries_kernel
from lockstep.kernels.hopper.backward.wide.tiles import CHUNK
from lockstep.kernels.hopper.common.copy_engine import flat_map, tensor_map
from lockstep.kernels.hopper.common.sizes import ROWS, SHARED_BYTES
from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs
from lockstep.problem import AttentionProblem, Tensors

BLOCK = ROWS  # queries and keys of a tile; programs of the second pass own two tiles of rows
BLOCK_Q = QUERIES.value
# Registers of a thread when a program starts; its partitions then share them out anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}


def cut_of(problem: AttentionProblem) -> Cut:
    """Tiles of the first pass, whose query tiles are those of the statistics."""
    return cut_into(problem, 256, BLOCK, BLOCK)


class WideCall(Call):
    """`Kernel.prepare_backward`"""

    def __init__(self, problem: AttentionProblem, given: BackwardTensors, needs: Needs) -> None:
        super().__init__(problem, given, needs, cut_of(problem))
        # Statistics, then bounds of packed sequences: `rows`.
        self.bounds_at = self.cut.n_tiles * 4 * BLOCK
        shape = (self.bounds_at + self.cut.n_bounds,)
        self.new_workspace = allocator(shape, torch.float32, self.where)

    def derive(
        self, tensors: Tensors, out: Tensor, statistics: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Gradients, tuple[Launched | None, ...]]:
        problem, cut, needs = self.problem, self.cut, self.needs
        workspace, dq, dk, dv = self.new_workspace(), None, None, None
        stats, bounds = workspace[: self.bounds_at], None
        if cut.n_bounds:
            bounds = workspace[self.bounds_at :].view(torch.int32)
        results = (out, statistics, dout, dlse)
        rows = self.prepare_statistics(tensors, results, stats, bounds, num_warps=8)
        keys = queries = None
        if needs.k or needs.v:
            dk, dv = self.new_dk(), self.new_dv()
            given = (problem, tensors, dout, stats, bounds)
            arguments, constants = keys_arguments(*given, dk, dv, cut)
            keys = self.launch(keys_kernel, (cut.programs, 1, 1), arguments, constants, **OPTIONS)
        if needs.q:
            dq = self.new_dq()
            arguments, constants = queries_arguments(
                problem, tensors, dout, stats, bounds, dq, cut
            )  # fmt: skip
            programs = slots_of(problem, problem.Sq, BLOCK_Q) * cut.sequences * problem.Hq
            queries = self.launch(queries_kernel, (programs, 1, 1), arguments, constants, **OPTIONS)
        return self.wanted(dq, dk, dv, tensors.sinks, stats), (rows, keys, queries)

    def again(self, stream: int, given: BackwardTensors, addresses: list[int]) -> Gradients:
        q, k, v, _, _, kv_lens, cu_q, cu_k, _, out, statistics, dout, dlse = addresses
        rows, keys, queries = self.launchers
        stats, dq, dk, dv = self.new_workspace(), None, None, None
        of_stats = stats.data_ptr()
        bounds = of_stats + 4 * self.bounds_at if self.cut.n_bounds else 0
        # In the order of their arguments, and no scratch memory.
        rows(stream, (out, dout, statistics, dlse, of_stats, 0, 0, 0, 0, bounds, cu_q, cu_k, 0))
        if keys is not None:
            dk, dv = self.new_dk(), self.new_dv()
            maps = (q, dout, of_stats, k, v, dk.data_ptr(), dv.data_ptr())
            keys(stream, (bounds, kv_lens, 0), maps)
        if queries is not None:
            dq = self.new_dq()
            maps = (q, dout, k, v, dq.data_ptr())
            queries(stream, (of_stats, bounds, kv_lens, 0), maps)
        return self.wanted(dq, dk, dv, given.sinks, stats)

    def row_statistics(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        cut = self.cut
        m, delta, log2_l, _ = (
            memory[: self.bounds_at].view(cut.sequences, cut.Hq, cut.q_slots, 4, BLOCK).unbind(3)
        )
        return m.double() * self.problem.score_unit + log2_l, delta


def keys_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    stats: Tensor,
    bounds: Tensor | None,
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
        *(bounds, tensors.kv_lens, *scales_of(problem)),
        *(cut.kv_slots, cut.q_slots, n_heads, problem.Hkv, problem.Hq // problem.Hkv),
        *sizes_of(problem, tensors.k),
    )
    return arguments, {**_chunks(problem), **constants_of(problem, BLOCK)}


def queries_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    stats: Tensor,
    bounds: Tensor | None,
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
        *(stats, bounds, tensors.kv_lens, *scales_of(problem)),
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
