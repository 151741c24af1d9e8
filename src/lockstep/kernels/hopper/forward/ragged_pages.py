"""Long sequences of ragged queries in pages: the forward in calls of the decode kernel.

A serving engine calls attention once for prompts, chunks of prompts and single tokens together. Of
each sequence its own queries decide which kernel runs it (`least_queries_in_pages`): so its bits do
not depend on its neighbours. Neither kernel touches the rows of the other.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.hopper.common.requirements import has_tiles_in_pages, has_too_many_rows
from lockstep.kernels.hopper.forward.idle_windows import without_idle_window
from lockstep.kernels.hopper.forward.launch import forward_launch
from lockstep.kernels.hopper.forward.narrow_window.launch import window_launch, window_tiling
from lockstep.kernels.hopper.forward.narrow_window.plan import has_narrow_window, sizes_of
from lockstep.kernels.hopper.forward.page_rule import least_queries_in_pages
from lockstep.kernels.hopper.forward.plan import plan_of
from lockstep.kernels.hopper.forward.scheduling.part_memory import n_arrivals, part_memory
from lockstep.kernels.hopper.forward.scheduling.part_rule import (
    MOST,
    UNITS,
    cuts_keys,
    few_queries,
)
from lockstep.kernels.hopper.forward.scheduling.sequence_order import order_buffer
from lockstep.kernels.hopper.forward.scheduling.tiling import Tiling
from lockstep.kernels.launch import Buffer, Launch
from lockstep.problem import AttentionProblem, Tensors


class LongSequences(NamedTuple):
    """What runs the long sequences of a call."""

    launches: list[Launch]
    """Of tiles whose keys have one part, and of others."""
    memory: dict[str, Buffer]
    """What it needs: `sequence_order` has to be there before it, from `list_tiles`."""
    sorting: dict[str, int]
    """Numbers of that."""
    are_all: bool
    """Whether every sequence is a long one, so that decode has none."""


def has_long_sequences(problem: AttentionProblem) -> bool:
    """Whether a call may have sequences that are the forward's."""
    if problem.layout != "varlen_paged" or problem.query_invariant:
        return False
    is_long = problem.longest_q >= least_queries_in_pages(problem)
    return is_long and has_tiles_in_pages(problem) and not has_too_many_rows(problem)


def long_sequences(
    problem: AttentionProblem, q: Tensor, fitted: Tensors, n_processors: int
) -> LongSequences:
    """Results lie as q does, of which `fitted` may have a copy."""
    problem = without_idle_window(problem)
    are_all, cuts = has_narrow_window(problem), cuts_keys(problem)
    if are_all:
        tiles, block_q = window_tiling(problem, n_processors), sizes_of(problem).chunk
        launches = [window_launch(problem, q, fitted, tiles)]
    else:
        tiles, block_q = Tiling.of(problem, n_processors), plan_of(problem).block_q
        launches = []
        if problem.longest_q >= few_queries(problem):
            launches = [forward_launch(problem, q, fitted, tiles, n_processors, early=cuts)]
    whole_group = tiles.group
    memory = {
        "sequence_order": order_buffer(problem, tiles.n_tickets, sorts=True),
        "statistics": Buffer.like(q, problem.statistics_shape, torch.float32),
    }
    if cuts:
        tiles = Tiling.of(problem, n_processors, has_parts=True)
        memory["cut_order"] = order_buffer(problem, max(tiles.n_tickets, UNITS), sorts=True)
        memory |= part_memory(problem, n_processors)
        launches.append(forward_launch(problem, q, fitted, tiles, n_processors, parts=True))
    sorting = {
        "least_queries": least_queries_in_pages(problem),
        "block_q": block_q,
        "n_arrivals": n_arrivals(problem, n_processors) if cuts else 0,
        "most_parts": MOST if cuts else 1,
        "Hq": problem.Hq,
        "diagonal": int(problem.window[1] is not None),
        "group": tiles.group,
        "whole_group": whole_group,
        "few_queries": few_queries(problem),
        # Rows of no sequence are decode's.
        "longest": 0 if are_all else problem.Sq,
        "CUTS": cuts,
    }
    return LongSequences(launches, memory, sorting, are_all)
