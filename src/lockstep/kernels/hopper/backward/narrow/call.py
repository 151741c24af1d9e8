"""From a problem of narrow heads to the launches of its backward."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.allocate import allocator
from lockstep.kernels.hopper.backward.call import (
    Call,
    Cut,
    Launched,
    constants_of,
    cut_into,
    masks,
    raggedness,
    reach,
    row_arguments,
    scales_of,
    sizes_of,
)
from lockstep.kernels.hopper.backward.narrow.kernel import backward_kernel
from lockstep.kernels.hopper.backward.rows import finish_queries
from lockstep.kernels.hopper.common.copy_engine import flat_map, tensor_map
from lockstep.kernels.hopper.forward.launch import processors
from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs
from lockstep.problem import AttentionProblem, Tensors

BLOCK_KV = 128
# By padded head dim: what leaves room for dK and dV, or for the scores, in 240 registers.
BLOCK_Q = {64: 128, 128: 64}
# Registers of a thread when a program starts; its partitions then share them out anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
# Tickets go round so many heads, by padded head dim. The more, the less programs of one head wait
# for each other, and the less they share of what L2 holds.
HEADS_AT_ONCE = {64: 16, 128: 8}
HEADS_AT_ONCE_WITH_MASK = {64: 48, 128: 24}


def cut_of(problem: AttentionProblem) -> Cut:
    block_d = 64 if max(problem.D, problem.Dv) <= 64 else 128
    return cut_into(problem, block_d, BLOCK_Q[block_d], BLOCK_KV)


class Layout(NamedTuple):
    """Where the parts of a workspace begin, in bytes. They are multiples of 512 each, but for the
    numbers of tiles at the end."""

    large: int
    sums: int
    flags: int
    turn: int
    ticket: int
    bounds: int
    end: int

    @staticmethod
    def of(cut: Cut) -> Layout:
        large = 4 * cut.n_tiles * 2 * cut.block_q
        sums = 2 * large
        flags = sums + 4 * cut.n_tiles * 32 * 256
        turn = flags + 4 * cut.n_tiles
        ticket = turn + 4 * cut.n_tiles
        bounds = ticket + 4
        return Layout(large, sums, flags, turn, ticket, bounds, bounds + 4 * cut.n_bounds)


@dataclass(frozen=True)
class Workspace:
    """What the launches leave for each other; `rows` says how."""

    stats: Tensor  # [n_tiles, 2, block_q] fp32
    large: Tensor  # [n_tiles, 2, block_q] fp32
    sums: Tensor  # [32 * n_tiles, 256] fp32
    flags: Tensor  # [n_tiles] int32
    turn: Tensor  # [n_tiles] int32
    ticket: Tensor  # [1] int32
    bounds: Tensor | None  # [3 * (B + 2)] int32, of packed sequences

    @staticmethod
    def of(cut: Cut, device: torch.device) -> Workspace:
        return Workspace.lay_out(
            cut, torch.empty(Layout.of(cut).end, dtype=torch.uint8, device=device)
        )

    @staticmethod
    def lay_out(cut: Cut, memory: Tensor) -> Workspace:
        at = Layout.of(cut)
        parts = [memory[begin:end] for begin, end in pairwise((0, *at))]
        stats, large, sums = (x.view(torch.float32) for x in parts[:3])
        *numbers, bounds = (x.view(torch.int32) for x in parts[3:])
        shape = (cut.n_tiles, 2, cut.block_q)
        return Workspace(
            *(stats.view(shape), large.view(shape), sums.view(-1, 256)),
            *numbers,
            bounds if cut.n_bounds else None,
        )


class NarrowCall(Call):
    """`Kernel.prepare_backward`"""

    def __init__(self, problem: AttentionProblem, given: BackwardTensors, needs: Needs) -> None:
        super().__init__(problem, given, needs, cut_of(problem))
        self.at = Layout.of(self.cut)
        self.new_workspace = allocator((self.at.end,), torch.uint8, self.where)

    def derive(
        self, tensors: Tensors, out: Tensor, statistics: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Gradients, tuple[Launched | None, ...]]:
        problem, cut = self.problem, self.cut
        memory = self.new_workspace()
        work = Workspace.lay_out(cut, memory)
        dq, dk, dv = (self.new_dq() if self.needs.q else None), self.new_dk(), self.new_dv()
        others = work.large, work.flags, work.turn, work.ticket
        results = (out, statistics, dout, dlse)
        rows = self.prepare_statistics(tensors, results, work.stats, work.bounds, others)
        arguments, constants = kernel_arguments(problem, tensors, dout, dk, dv, cut, work)
        programs = min(cut.programs, processors(dout.device))
        pairs = self.launch(backward_kernel, (programs, 1, 1), arguments, constants, **OPTIONS)
        queries = None
        if dq is not None:
            arguments, constants = queries_arguments(problem, tensors, dq, cut, work)
            queries = self.launch(finish_queries, (cut.n_tiles, 2, 1), arguments, constants)
        return self.wanted(dq, dk, dv, tensors.sinks, memory), (rows, pairs, queries)

    def again(self, stream: int, given: BackwardTensors, addresses: list[int]) -> Gradients:
        q, k, v, _, _, kv_lens, cu_q, cu_k, _, out, statistics, dout, dlse = addresses
        rows, pairs, queries = self.launchers
        workspace, dk, dv = self.new_workspace(), self.new_dk(), self.new_dv()
        dq = None
        stats = workspace.data_ptr()
        large, sums, flags, turn, ticket, bounds = (stats + at for at in self.at[:-1])
        bounds = bounds if self.cut.n_bounds else 0
        # In the order of their arguments, and no scratch memory.
        rows(
            stream,
            (out, dout, statistics, dlse, stats, large, flags, turn, ticket, bounds, cu_q, cu_k, 0),
        )
        pairs(
            stream,
            (large, flags, turn, ticket, bounds, kv_lens, 0),
            (q, dout, stats, k, v, dk.data_ptr(), dv.data_ptr(), sums),
        )
        if queries is not None:
            dq = self.new_dq()
            queries(stream, (sums, dq.data_ptr(), cu_q, cu_k, kv_lens, 0))
        return self.wanted(dq, dk, dv, given.sinks, workspace)

    def row_statistics(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        cut, work = self.cut, Workspace.lay_out(self.cut, memory)
        lse2, delta = work.stats.unbind(1)
        m, log2_l = work.large.unbind(1)
        exact = m.double() * self.problem.score_unit + log2_l
        lse2 = torch.where((work.flags != 0)[:, None], exact, lse2.double())
        shape = (cut.sequences, cut.Hq, cut.q_slots, cut.block_q)
        return lse2.view(shape), delta.view(shape)


def kernel_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    dk: Tensor,
    dv: Tensor,
    cut: Cut,
    work: Workspace,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and compile-time constants of `backward_kernel`."""
    packed, ragged_kv = raggedness(problem)
    query_block = [1, 1, 1, cut.block_q, cut.block_d]
    key_block = [1, 1, 1, BLOCK_KV, cut.block_d]
    n_heads = cut.sequences * problem.Hkv
    is_masked = problem.window != (None, None)
    at_once = (HEADS_AT_ONCE_WITH_MASK if is_masked else HEADS_AT_ONCE)[cut.block_d]
    at_once = min(n_heads, at_once)
    arguments = (
        tensor_map(tensors.q, query_block, packed, packed),
        tensor_map(dout, query_block, packed, packed),
        flat_map(work.stats.view(-1), [2 * cut.block_q]),
        tensor_map(tensors.k, key_block, packed, ragged_kv),
        tensor_map(tensors.v, key_block, packed, ragged_kv),
        tensor_map(dk, query_block, packed, packed),
        tensor_map(dv, query_block, packed, packed),
        flat_map(work.sums, [32, 256]),
        *(work.large, work.flags, work.turn, work.ticket, work.bounds, tensors.kv_lens),
        *scales_of(problem),
        *(cut.kv_slots, cut.q_slots, n_heads, at_once, problem.Hkv, problem.Hq // problem.Hkv),
        *sizes_of(problem, tensors.k),
    )
    return arguments, constants_of(problem, BLOCK_KV)


def queries_arguments(
    problem: AttentionProblem, tensors: Tensors, dq: Tensor, cut: Cut, work: Workspace
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Those of `finish_queries`."""
    arguments = (
        *(work.sums, dq, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens),
        *(*row_arguments(problem, cut), *reach(problem), problem.scale),
    )
    constants = {"D": problem.D, "BLOCK_Q": cut.block_q, "BLOCK_KV": BLOCK_KV, **masks(problem)}
    return arguments, constants
