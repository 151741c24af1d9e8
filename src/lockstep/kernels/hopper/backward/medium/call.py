"""From a problem of medium heads to the launches of its backward."""

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
    sinks_launch,
    window_arguments,
)
from lockstep.kernels.hopper.backward.medium.dq_sums import SUMS_ROWS
from lockstep.kernels.hopper.backward.medium.kernel import medium_kernel
from lockstep.kernels.hopper.backward.medium.tiles import MAIN
from lockstep.kernels.hopper.backward.rows import finish_queries
from lockstep.kernels.hopper.common.copy_engine import flat_map
from lockstep.kernels.hopper.common.sizes import ROWS, processors
from lockstep.kernels.kernel import BackwardTensors, Needs, PreparedBackward
from lockstep.kernels.launch import Buffer, Launch
from lockstep.problem import AttentionProblem

BLOCK_KV, BLOCK_Q = 128, 64
# What head dims are padded to.
D, DV = 192, 128
# Registers of a thread when a program starts; its partitions then share them out anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
# Tickets go round so many heads: `narrow/call.py`.
HEADS_AT_ONCE, HEADS_AT_ONCE_WITH_MASK = 8, 24
# What narrow heads have besides in their workspace.
NARROW = ("large", "flags")


def cut_of(problem: AttentionProblem) -> Cut:
    return cut_into(problem, DV, BLOCK_Q, BLOCK_KV)


def prepare_backward(
    problem: AttentionProblem, given: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    cut, fitted = cut_of(problem), fit_inputs(given)
    # `rows` says what these hold.
    workspace = {
        "stats": Buffer((cut.n_tiles, 4, BLOCK_Q), torch.float32),
        "sums": Buffer((SUMS_ROWS.value * cut.n_tiles, 256), torch.float32),
        "turn": Buffer((cut.n_tiles,), torch.int32),
        "ticket": Buffer((1,), torch.int32),
        "bounds": bounds_buffer(cut),
    }
    launches = [
        rows_launch(problem, cut, given.q, fitted.dout, NARROW),
        Launch(
            medium_kernel,
            (min(cut.programs, processors(given.dout.device)),),
            pairs_arguments(problem, fitted.k, cut),
            maps=pairs_maps(problem),
            names={
                "q_rest": "q", "k_rest": "k", "dk_rest": "dk", "chunk": "sums", "middle": "sums",
            },
            **OPTIONS,
        ),
    ]  # fmt: skip
    made = ["dk", "dv"]
    if needs.q:
        arguments = queries_arguments(problem, cut, given.q)
        launches.append(Launch(finish_queries, (cut.n_tiles, D // 64), arguments, names=OFFSETS))
        made.append("dq")
    if needs.sinks:
        launches.append(sinks_launch(problem, cut, NARROW))
        made.append("dsinks")
    return backward_launches(given, needs, made, workspace, launches)


def pairs_arguments(problem: AttentionProblem, k: Tensor, cut: Cut) -> dict[str, Any]:
    """Numbers and constants of `medium_kernel`."""
    n_heads = cut.sequences * problem.Hkv
    is_masked = problem.window != (None, None)
    return {
        **kernel_arguments(problem, k, BLOCK_KV),
        "kv_slots": cut.kv_slots,
        "q_slots": cut.q_slots,
        "n_heads": n_heads,
        "heads_at_once": min(n_heads, HEADS_AT_ONCE_WITH_MASK if is_masked else HEADS_AT_ONCE),
        "Hkv": problem.Hkv,
    }


def pairs_maps(problem: AttentionProblem) -> dict[str, Any]:
    """A function that makes the tensor maps of `medium_kernel`."""
    return {
        "q": map_maker(problem, BLOCK_Q, MAIN.value),
        "q_rest": map_maker(problem, BLOCK_Q, D - MAIN.value),
        "dout": map_maker(problem, BLOCK_Q, DV),
        "stats": lambda stats: flat_map(stats.view(-1), [4 * BLOCK_Q]),
        "k": map_maker(problem, BLOCK_KV, MAIN.value, of_keys=True),
        "k_rest": map_maker(problem, BLOCK_KV, D - MAIN.value, of_keys=True),
        "v": map_maker(problem, BLOCK_KV, DV, of_keys=True),
        "dk": map_maker(problem, ROWS, MAIN.value),
        "dk_rest": map_maker(problem, ROWS, D - MAIN.value),
        "dv": map_maker(problem, BLOCK_KV, DV),
        "chunk": partial(flat_map, block=[16, 256]),
        "middle": partial(flat_map, block=[8, 256]),
    }


def queries_arguments(problem: AttentionProblem, cut: Cut, q: Tensor) -> dict[str, Any]:
    """Numbers and constants of `finish_queries`."""
    return {
        **row_arguments(problem, cut, q),
        **window_arguments(problem),
        "scale": problem.scale,
        "D": problem.D,
        "REST": 64,
        "BLOCK_Q": BLOCK_Q,
        "BLOCK_KV": BLOCK_KV,
        "PARTS": D // 64,
        "EARLY": False,
    }
