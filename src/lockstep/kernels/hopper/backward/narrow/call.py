"""From a problem of narrow heads to the launches of its backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper.backward.call import (
    OFFSETS,
    Cut,
    backward_launches,
    bounds_buffer,
    cut_into,
    fit_inputs,
    kernel_arguments,
    map_maker,
    row_arguments,
    rows_launch,
    window_arguments,
)
from lockstep.kernels.hopper.backward.narrow.kernel import backward_kernel
from lockstep.kernels.hopper.backward.rows import finish_queries
from lockstep.kernels.hopper.common.copy_engine import flat_map
from lockstep.kernels.hopper.common.sizes import columns, processors
from lockstep.kernels.kernel import BackwardTensors, Needs, PreparedBackward
from lockstep.kernels.launch import Buffer, Launch
from lockstep.problem import AttentionProblem

BLOCK_KV = 128
# Scores are products over at least so many columns. With 16, which take one instruction, ptxas lost
# the addresses of keys where there is no mask: half of dq was wrong.
LEAST_COLUMNS = 32
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


def prepare_backward(
    problem: AttentionProblem, given: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    cut, fitted = cut_of(problem), fit_inputs(given)
    of_tiles = Buffer((cut.n_tiles,), torch.int32)
    of_rows = Buffer((cut.n_tiles, 2, cut.block_q), torch.float32)
    # `rows` says what these hold.
    workspace = {
        "stats": of_rows,
        "large": of_rows,
        "sums": Buffer((32 * cut.n_tiles, 256), torch.float32),
        "flags": of_tiles,
        "turn": of_tiles,
        "ticket": Buffer((1,), torch.int32),
        "bounds": bounds_buffer(cut),
    }
    absent, names = (), {}
    if problem.constant_time:
        absent = ("large", "flags")
        workspace["stats"] = Buffer((cut.n_tiles, 4, cut.block_q), torch.float32)
        workspace |= dict.fromkeys(absent)
        # Kernels read log2 l from `stats` if it is not in shared memory; flags may be any pointer.
        names = dict.fromkeys(absent, "stats")
    launches = [
        rows_launch(problem, cut, given.q, fitted.dout, absent),
        Launch(
            backward_kernel,
            (min(cut.programs, processors(given.dout.device)),),
            pairs_arguments(problem, fitted.k, cut),
            maps=pairs_maps(problem, cut),
            names=names,
            **OPTIONS,
        ),
    ]
    made = ["dk", "dv"]
    if needs.q:
        arguments = queries_arguments(problem, cut, given.q)
        launches.append(Launch(finish_queries, (cut.n_tiles, 2), arguments, names=OFFSETS))
        made.append("dq")
    statistics = partial(row_statistics, problem, cut)
    return backward_launches(given, needs, made, workspace, launches, statistics)


def row_statistics(
    problem: AttentionProblem, cut: Cut, regions: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """`call.Statistics`"""
    shape = (cut.sequences, cut.Hq, cut.q_slots, cut.block_q)
    if problem.constant_time:
        m, delta, log2_l, _ = regions["stats"].unbind(1)
        return (m.double() * problem.score_unit + log2_l).view(shape), delta.reshape(shape)
    lse2, delta = regions["stats"].unbind(1)
    m, log2_l = regions["large"].unbind(1)
    exact = m.double() * problem.score_unit + log2_l
    lse2 = torch.where((regions["flags"] != 0)[:, None], exact, lse2.double())
    return lse2.view(shape), delta.view(shape)


def pairs_arguments(problem: AttentionProblem, k: Tensor, cut: Cut) -> dict[str, Any]:
    """Numbers and constants of `backward_kernel`."""
    n_heads = cut.sequences * problem.Hkv
    is_masked = problem.window != (None, None)
    at_once = (HEADS_AT_ONCE_WITH_MASK if is_masked else HEADS_AT_ONCE)[cut.block_d]
    return {
        **kernel_arguments(problem, k, BLOCK_KV),
        "kv_slots": cut.kv_slots,
        "q_slots": cut.q_slots,
        "n_heads": n_heads,
        "heads_at_once": min(n_heads, at_once),
        "Hkv": problem.Hkv,
        "D_COLUMNS": max(columns(problem.D), LEAST_COLUMNS),
        "DV_COLUMNS": columns(problem.Dv),
    }


def pairs_maps(problem: AttentionProblem, cut: Cut) -> dict[str, Any]:
    """A function that makes the tensor maps of `backward_kernel`."""
    of_queries = map_maker(problem, cut.block_q, cut.block_d)
    of_keys = map_maker(problem, BLOCK_KV, cut.block_d, of_keys=True)
    return {
        **dict.fromkeys(("q", "dout", "dk", "dv"), of_queries),
        **dict.fromkeys(("k", "v"), of_keys),
        "stats": lambda stats: flat_map(stats.view(-1), [2 * cut.block_q]),
        "sums": partial(flat_map, block=[32, 256]),
    }


def queries_arguments(problem: AttentionProblem, cut: Cut, q: Tensor) -> dict[str, Any]:
    """Numbers and constants of `finish_queries`."""
    return {
        **row_arguments(problem, cut, q),
        **window_arguments(problem),
        "scale": problem.scale,
        "D": problem.D,
        "BLOCK_Q": cut.block_q,
        "BLOCK_KV": BLOCK_KV,
        "PARTS": 2,
    }
