"""Gradients on Hopper GPUs: five matrix products per pair of tiles, one order for every sum.

    backward_call     what it shares with the backward of wide heads
    backward_rows     lse2 and delta of each row; dQ from its sums    one short launch each
    backward_kernel   dK, dV and the sums of dQ                       where the time goes
    backward_walk     which keys and queries a program works on
    backward_tiles    what its warps share
    backward_turns    the order in which programs add to dQ
    backward_strays   what is not finite, and who does not see it

dQ of a row adds up key tiles in descending order; dK and dV of a key add up query heads and query
tiles in ascending order. Tiles start at multiples of their size, counted in the own sequence. So
no bit depends on the batch, on the GPU or on how a launch happens to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper import MAX_HEAD_DIM
from lockstep.kernels.hopper.backward_call import (
    Cut,
    constants_of,
    cut_into,
    fit_inputs,
    launch,
    masks,
    new_gradients,
    prepare_statistics,
    raggedness,
    reach,
    row_arguments,
    scales_of,
    sizes_of,
    wanted,
)
from lockstep.kernels.hopper.backward_kernel import backward_kernel
from lockstep.kernels.hopper.backward_rows import finish_queries
from lockstep.kernels.hopper.copy_engine import flat_map, tensor_map
from lockstep.kernels.kernel import Gradients, Needs
from lockstep.problem import AttentionProblem, Tensors

BLOCK_KV = 128
# By padded head dim: what leaves room for dK and dV, or for the scores, in 240 registers.
BLOCK_Q = {64: 128, 128: 64}
# Registers of a thread when a program starts; its partitions then share them out anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
# Where all walks begin at the first query tile, programs of one head follow each other a step
# apart. Tickets go round so many heads that these programs make no more than this many.
KEY_TILES_AT_ONCE = 128


def supports_backward(problem: AttentionProblem) -> str | None:
    """Why the backward refuses a problem that the forward may take."""
    if problem.layout == "paged":
        return "has no backward through pages"
    if problem.bias_shape is not None:
        return "has no backward through a bias"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {str(problem.dtype).removeprefix('torch.')}"
    if max(problem.D, problem.Dv) > MAX_HEAD_DIM:
        return f"has a backward for D and Dv up to 256, got {problem.D} and {problem.Dv}"
    if problem.D % 8 or problem.Dv % 8:
        return f"takes D and Dv that are multiples of 8, got {problem.D} and {problem.Dv}"
    if 0 in (problem.B, problem.Sq, problem.Skv):
        return "takes at least one query and one key"
    return None


def cut_of(problem: AttentionProblem) -> Cut:
    block_d = 64 if max(problem.D, problem.Dv) <= 64 else 128
    return cut_into(problem, block_d, BLOCK_Q[block_d], BLOCK_KV)


@dataclass(frozen=True)
class Workspace:
    """What the launches leave for each other; `backward_rows` says how."""

    stats: Tensor  # [n_tiles, 2, block_q] fp32
    sums: Tensor  # [32 * n_tiles, 256] fp32
    turn: Tensor  # [n_tiles] int32
    ticket: Tensor  # [1] int32

    @staticmethod
    def of(cut: Cut, device: torch.device) -> Workspace:
        stats = torch.empty((cut.n_tiles, 2, cut.block_q), dtype=torch.float32, device=device)
        sums = torch.empty((cut.n_tiles * 32, 256), dtype=torch.float32, device=device)
        counts = torch.empty(cut.n_tiles + 1, dtype=torch.int32, device=device)
        return Workspace(stats, sums, counts[:-1], counts[-1:])


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
    tensors, dout = fit_inputs(tensors, dout)
    cut = cut_of(problem)
    work = Workspace.of(cut, dout.device)
    dq, dk, dv = new_gradients(tensors)
    counters = work.turn, work.ticket
    prepare_statistics(problem, tensors, (out, lse, dout, dlse), work.stats, cut, counters)
    arguments, constants = kernel_arguments(problem, tensors, dout, dk, dv, cut, work)
    launch(backward_kernel, (cut.programs, 1, 1), arguments, constants, **OPTIONS)
    if needs.q:
        launch(
            finish_queries,
            (cut.n_tiles, 2, 1),
            (
                *(work.sums, dq, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens),
                *(*row_arguments(problem, cut), *reach(problem), problem.scale),
            ),
            {"D": problem.D, "BLOCK_Q": cut.block_q, "BLOCK_KV": BLOCK_KV, **masks(problem)},
        )
    return wanted(needs, dq, dk, dv, tensors.sinks, work.stats, cut)


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
    at_once = 1
    if problem.window[1] is None:
        at_once = min(n_heads, max(1, KEY_TILES_AT_ONCE // cut.kv_slots))
    arguments = (
        tensor_map(tensors.q, query_block, packed, packed),
        tensor_map(dout, query_block, packed, packed),
        flat_map(work.stats.view(-1), [2 * cut.block_q]),
        tensor_map(tensors.k, key_block, packed, ragged_kv),
        tensor_map(tensors.v, key_block, packed, ragged_kv),
        tensor_map(dk, key_block, packed, packed),
        tensor_map(dv, key_block, packed, packed),
        flat_map(work.sums, [32, 256]),
        *(work.turn, work.ticket, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens),
        *scales_of(problem),
        *(cut.kv_slots, cut.q_slots, n_heads, at_once, problem.Hkv, problem.Hq // problem.Hkv),
        *sizes_of(problem, tensors.k),
    )
    return arguments, constants_of(problem, BLOCK_KV)
