"""How many tiles a launch has, and in which order its programs take them."""

from __future__ import annotations

from typing import NamedTuple

from lockstep.kernels.hopper.forward.plan import deals_singly, pays_to_pair, plan_of
from lockstep.kernels.hopper.forward.scheduling.schedule import (
    BY_HEAD,
    LONGEST_FIRST,
    PAIRED,
    UNSORTED,
)
from lockstep.problem import AttentionProblem


class Tiling(NamedTuple):
    """How many tiles of query rows there are, and in which order programs take them."""

    n_q_tiles: int
    """Tiles of a head. Packed sequences may own one too many each; one is for rows without any."""
    heads: int
    order: int

    @property
    def n_tickets(self) -> int:
        return self.heads * self.n_q_tiles

    @staticmethod
    def of(problem: AttentionProblem, n_processors: int) -> Tiling:
        block_q = plan_of(problem).block_q
        left, right = problem.window
        if problem.layout == "varlen":
            heads, n_q_tiles = problem.Hq, problem.Sq // block_q + problem.B + 1
            order = LONGEST_FIRST if heads * n_q_tiles > n_processors else UNSORTED
            return Tiling(n_q_tiles, heads, order.value)
        heads, n_q_tiles = problem.B * problem.Hq, -(-problem.Sq // block_q)
        if left is not None or right is None:
            return Tiling(n_q_tiles, heads, BY_HEAD.value)
        row_bytes = (problem.D + problem.Dv) * 2
        head_bytes = problem.Skv * row_bytes * problem.Hkv // problem.Hq
        pairs = pays_to_pair(heads, n_q_tiles, n_processors, head_bytes)
        pairs = pairs and not deals_singly(problem, n_q_tiles)
        return Tiling(n_q_tiles, heads, (PAIRED if pairs else LONGEST_FIRST).value)
