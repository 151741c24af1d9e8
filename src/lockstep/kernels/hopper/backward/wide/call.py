"""From a problem of wide heads to the launches of its backward."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.hopper.backward.call import (
    OPTIONS,
    Cut,
    backward_launches,
    bounds_buffer,
    cut_into,
    fit_inputs,
    kernel_arguments,
    keys_launch,
    loop_arguments,
    map_maker,
    rows_launch,
    shares_buffers,
    sinks_buffer,
    sinks_launch,
    slots_of,
)
from lockstep.kernels.hopper.backward.wide.key_loop import BLOCK_Q as QUERIES
from lockstep.kernels.hopper.backward.wide.keys import keys_kernel
from lockstep.kernels.hopper.backward.wide.queries import queries_kernel
from lockstep.kernels.hopper.backward.wide.tiles import CHUNK
from lockstep.kernels.hopper.common.copy_engine import flat_map
from lockstep.kernels.hopper.common.sizes import ROWS, SHARED_BYTES
from lockstep.kernels.kernel import BackwardTensors, Needs, PreparedBackward
from lockstep.kernels.launch import Buffer, Launch
from lockstep.problem import AttentionProblem

BLOCK = ROWS  # queries and keys of a tile; programs of the second pass own two tiles of rows
BLOCK_Q = QUERIES.value


def cut_of(problem: AttentionProblem) -> Cut:
    """Tiles of the first pass, whose query tiles are those of the statistics."""
    return cut_into(problem, 256, BLOCK, BLOCK)


def prepare_backward(
    problem: AttentionProblem, given: BackwardTensors, needs: Needs
) -> PreparedBackward:
    """`Kernel.prepare_backward`"""
    cut, fitted = cut_of(problem), fit_inputs(given)
    # `rows` says what these hold.
    workspace = {
        "stats": Buffer((cut.n_tiles, 4, BLOCK), torch.float32),
        "bounds": bounds_buffer(cut),
        "sink_sums": sinks_buffer(cut, needs),
        **shares_buffers(problem, cut, _columns(problem)),
    }
    launches = [rows_launch(problem, cut, given.q, fitted.dout, workspace, num_warps=8)]
    made = []
    if needs.k or needs.v:
        arguments, maps = keys_arguments(problem, fitted.k, cut), keys_maps(problem)
        launches.append(Launch(keys_kernel, (cut.programs,), arguments, maps=maps, **OPTIONS))
        made += ["dk", "dv"]
    if needs.q:
        programs = slots_of(problem, problem.Sq, BLOCK_Q) * cut.sequences * problem.Hq
        arguments, maps = queries_arguments(problem, fitted.k, cut), queries_maps(problem)
        # Alone, it must not start before there are statistics.
        options = OPTIONS | {"launch_pdl": bool(made)}
        launches.append(Launch(queries_kernel, (programs,), arguments, maps=maps, **options))
        made.append("dq")
    if cut.shares is not None and (needs.k or needs.v):
        launches.append(keys_launch(problem, cut, given, _columns(problem)))
    if needs.sinks:
        launches.append(sinks_launch(problem, cut))
        made.append("dsinks")
    return backward_launches(given, needs, made, workspace, launches)


def keys_arguments(problem: AttentionProblem, k: Tensor, cut: Cut) -> dict[str, Any]:
    """Numbers and constants of `keys_kernel`."""
    return {
        **kernel_arguments(problem, k, BLOCK, cut.shares is not None),
        **_chunks(problem),
        **loop_arguments(problem, cut),
    }


def keys_maps(problem: AttentionProblem) -> dict[str, Any]:
    """A function that makes the tensor maps of `keys_kernel`."""
    of_queries = map_maker(problem, BLOCK, CHUNK.value)
    of_keys = map_maker(problem, BLOCK, CHUNK.value, of_keys=True)
    return {
        **dict.fromkeys(("q", "dout", "dk", "dv"), of_queries),
        **dict.fromkeys(("k", "v"), of_keys),
        "stats": lambda stats: flat_map(stats.view(-1), [4 * BLOCK]),
    }


def queries_arguments(problem: AttentionProblem, k: Tensor, cut: Cut) -> dict[str, Any]:
    """Numbers and constants of `queries_kernel`."""
    return {
        **kernel_arguments(problem, k, BLOCK),
        **_chunks(problem),
        **_stages(problem),
        "q_slots": slots_of(problem, problem.Sq, BLOCK_Q),
        "stats_slots": cut.q_slots,
        "Hq": problem.Hq,
        "heads_per_kv": problem.Hq // problem.Hkv,
    }


def queries_maps(problem: AttentionProblem) -> dict[str, Any]:
    """A function that makes the tensor maps of `queries_kernel`."""
    of_queries = map_maker(problem, BLOCK_Q, CHUNK.value)
    of_keys = map_maker(problem, BLOCK, CHUNK.value, of_keys=True)
    maps = dict.fromkeys(("q", "dout", "dq"), of_queries)
    return maps | dict.fromkeys(("k", "v"), of_keys)


def _stages(problem: AttentionProblem) -> dict[str, int]:
    """How many key tiles of the second pass may be under way. Values are read once, keys once more
    a product later: they get the second stage first."""
    nd, ndv = _chunks(problem).values()
    free = SHARED_BYTES // (2 * BLOCK * CHUNK.value) - 2 * (nd + ndv)
    v_stages = min(2, (free - 2 * nd) // ndv)
    return {"K_STAGES": min(3, (free - v_stages * ndv) // nd), "V_STAGES": v_stages}


def _columns(problem: AttentionProblem) -> tuple[int, int]:
    """Columns of k and of v that are multiplied."""
    nd, ndv = _chunks(problem).values()
    return nd * CHUNK.value, ndv * CHUNK.value


def _chunks(problem: AttentionProblem) -> dict[str, int]:
    nd, ndv = (triton.cdiv(D, CHUNK.value) for D in (problem.D, problem.Dv))
    return {"ND": nd, "NDV": ndv}
