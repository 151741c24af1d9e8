"""From a problem of medium heads to the launches of its backward."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper.backward.call import (
    OPTIONS,
    Cut,
    backward_launches,
    bounds_buffer,
    cut_into,
    fit_inputs,
    kernel_arguments,
    map_maker,
    queries_launch,
    rows_launch,
    sinks_buffer,
    sinks_launch,
)
from lockstep.kernels.hopper.backward.medium.dq_sums import SUMS_ROWS
from lockstep.kernels.hopper.backward.medium.kernel import medium_kernel
from lockstep.kernels.hopper.backward.medium.tiles import MAIN
from lockstep.kernels.hopper.common.copy_engine import flat_map
from lockstep.kernels.hopper.common.sizes import ROWS, processors
from lockstep.kernels.kernel import BackwardTensors, Needs, PreparedBackward
from lockstep.kernels.launch import Buffer, Launch
from lockstep.problem import AttentionProblem

BLOCK_KV, BLOCK_Q = 128, 64
# What head dims are padded to.
D, DV = 192, 128
# Tickets go round so many heads (`narrow/call.py`), and with a mask round more that have no group.
HEADS_AT_ONCE, HEADS_AT_ONCE_WITH_MASK = 8, 16


def cut_of(problem: AttentionProblem) -> Cut:
    return cut_into(problem, DV, BLOCK_Q, BLOCK_KV, may_share=False)


def prepare_backward(
    problem: AttentionProblem, given: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    cut, fitted = cut_of(problem), fit_inputs(given)
    # `rows` says what these hold.
    workspace = {
        "stats": Buffer((cut.n_tiles, 4, BLOCK_Q), torch.float32),
        "sums": Buffer((SUMS_ROWS.value * cut.n_tiles, 256), torch.float32),
        "turn": Buffer((2 * cut.n_tiles,), torch.int32),
        "ticket": Buffer((1,), torch.int32),
        "bounds": bounds_buffer(cut),
        "sink_sums": sinks_buffer(cut, needs),
    }
    launches = [
        rows_launch(problem, cut, given.q, fitted.dout, workspace),
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
        launches.append(queries_launch(problem, cut, given.q, D // 64, turns=2))
        made.append("dq")
    if needs.sinks:
        launches.append(sinks_launch(problem, cut))
        made.append("dsinks")
    return backward_launches(given, needs, made, workspace, launches)


def pairs_arguments(problem: AttentionProblem, k: Tensor, cut: Cut) -> dict[str, Any]:
    """Numbers and constants of `medium_kernel`."""
    is_more = problem.window != (None, None) and problem.Hq == problem.Hkv
    return {
        **kernel_arguments(problem, k, BLOCK_KV),
        "kv_slots": cut.kv_slots,
        "q_slots": cut.q_slots,
        "n_heads": cut.n_heads,
        "heads_at_once": cut.heads_at_once(HEADS_AT_ONCE_WITH_MASK if is_more else HEADS_AT_ONCE),
        "Hkv": problem.Hkv,
        "heads_per_kv": problem.Hq // problem.Hkv,
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
