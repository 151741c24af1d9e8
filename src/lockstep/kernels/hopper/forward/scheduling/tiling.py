"""How many tiles a launch has, and in which order its programs take them."""

from __future__ import annotations

from math import gcd
from typing import NamedTuple

from lockstep.kernels.hopper.common.sizes import ROWS
from lockstep.kernels.hopper.forward.groups import (
    has_more_keys,
    most_tiles,
    n_tiles,
    rows_of,
    rows_of_group,
)
from lockstep.kernels.hopper.forward.plan import plan_of
from lockstep.kernels.hopper.forward.scheduling.part_rule import (
    UNITS,
    cuts_keys,
    most_parts,
    part_group,
)
from lockstep.kernels.hopper.forward.scheduling.schedule import (
    BY_HEAD,
    LONGEST_FIRST,
    PAIRED,
    UNSORTED,
)
from lockstep.kernels.hopper.forward.shapes import NEAR_L2_BYTES
from lockstep.problem import AttentionProblem

# Tiles of a head that all see this share of its keys are at work at the same time, if all keys of a
# call do not fit into L2.
ALIKE = 0.75
# Pairing tiles is worth it while the keys and values of the heads at work fit into L2.
L2_BYTES = 50e6
# Of so few tiles, one in the middle is a good part: they are faster singly.
FEW_TILES = 3
# Tiles with a softcap take longer in pairs, most behind a window, of which up to so many have been
# measured.
MOST_CAPPED_TILES = 40
# Measured in constant time: up to so many tiles of narrow heads, all of whose keys stay in L2, are
# done earlier singly than in pairs.
SINGLE_TILES = 8


class Tiling(NamedTuple):
    """How many tiles of query rows there are, and in which order programs take them."""

    n_q_tiles: int
    """Tiles of a head, or of a group of heads that share them. Packed sequences may own one too
    many each; one is for rows without any."""
    heads: int
    order: int
    turn: int = 0
    parts: int = 0
    """Parts of a tile that have places of their own among those of a head, 0 if none have."""
    group: int = 1
    """Heads that share a tile."""

    @property
    def n_tickets(self) -> int:
        return self.heads * self.n_q_tiles

    @staticmethod
    def of(problem: AttentionProblem, n_processors: int, has_parts: bool = False) -> Tiling:
        """Those of one kind of sequences in pages: whose tiles may have parts, or of others."""
        group = part_group(problem) if has_parts else rows_of_group(problem)
        return Tiling._of(problem, n_processors, group)._replace(group=group)

    @staticmethod
    def _of(problem: AttentionProblem, n_processors: int, group: int) -> Tiling:
        block_q = plan_of(problem).block_q
        left, right = problem.window
        heads = problem.Hq // group
        if problem.is_packed:
            n_q_tiles = most_tiles(problem.Sq, problem.B, group, block_q)
            # Lengths of keys in pages are in the sequence order alone.
            is_sorted = heads * n_q_tiles > n_processors or problem.is_paged
            return Tiling(n_q_tiles, heads, (LONGEST_FIRST if is_sorted else UNSORTED).value)
        heads, n_q_tiles = problem.B * heads, n_tiles(problem.Sq, group, block_q)
        parts = most_parts(problem)
        if parts > 1 and heads * n_q_tiles * parts <= UNITS:
            return Tiling(n_q_tiles * parts, heads, BY_HEAD.value, parts=parts)
        low = has_low_tile(rows_of(problem.Sq, group), block_q)
        if left is not None:
            low_at_same = low and gcd(n_q_tiles, n_processors) > 1
            order = _order_of_windows(problem, n_q_tiles, low_at_same)
            turn = turn_of(n_q_tiles, n_processors) if order == PAIRED.value else 0
            return Tiling(n_q_tiles, heads, order, turn)
        if right is None or is_chunk(problem, block_q):
            return Tiling(n_q_tiles, heads, BY_HEAD.value)
        if problem.softcap is not None and n_q_tiles > 2:
            return Tiling(n_q_tiles, heads, LONGEST_FIRST.value)
        row_bytes = (problem.D + problem.Dv) * 2
        head_bytes = problem.Skv * row_bytes * problem.Hkv * group // problem.Hq
        pairs = pays_to_pair(heads, n_q_tiles, n_processors, head_bytes)
        pairs = pairs and not deals_singly(problem, n_q_tiles)
        # Single tiles fill the rounds better, if all keys stay near meanwhile.
        pairs = pairs and key_bytes(problem) > NEAR_L2_BYTES
        if not pairs:
            return Tiling(n_q_tiles, heads, LONGEST_FIRST.value)
        # Pairs are equally long, but for the tile in the middle, and one with a low tile.
        turn = turn_of(n_q_tiles, n_processors) if n_q_tiles % 2 or low else 0
        return Tiling(n_q_tiles, heads, PAIRED.value, turn)


def n_programs(problem: AttentionProblem, tiles: Tiling, n_processors: int) -> int:
    """How many programs there are for so many tiles, of which the rows of each consumer may have
    one. Of two tiles of a head, each of an even number of programs would have the same of all
    heads, and half of them those with few rows."""
    parts = plan_of(problem).consumers if splits_tiles(problem) else 1
    is_unmasked = problem.window == (None, None) and problem.layout == "dense"
    is_measured = max(problem.D, problem.Dv) > 64 and not problem.constant_time
    if is_unmasked and is_measured and tiles.n_q_tiles == 2 and tiles.n_tickets > n_processors:
        return n_processors - 1 + n_processors % 2
    n_tickets = tiles.n_tickets
    if problem.is_packed and cuts_keys(problem):
        n_tickets = max(n_tickets, UNITS)
    return min(n_processors, n_tickets * parts)


def has_low_tile(rows: int, block_q: int) -> bool:
    """Whether the last tile of so many rows leaves a consumer without any, and takes less time."""
    return 0 < rows % block_q <= block_q - ROWS


def turn_of(n_q_tiles: int, n_processors: int) -> int:
    """The least turn with which programs work on all pairs of a head in as many rounds."""
    pairs = -(-n_q_tiles // 2)
    return next(turn for turn in range(pairs) if gcd(n_processors + turn, pairs) == 1)


def _order_of_windows(problem: AttentionProblem, n_q_tiles: int, low_at_same: bool) -> int:
    """The order of tiles that have a window. Those of a sequence's first rows see less than a whole
    one, and come last if there are few, or the windows of all heads stay in L2 meanwhile; else in
    pairs, as causal ones do. Chunks that have none of these go by head, unless the low tiles of all
    heads would be the same programs' (`low_at_same`)."""
    left, right = problem.window
    assert left is not None
    if right is not None:
        if problem.Skv - problem.Sq >= left and not low_at_same:
            return BY_HEAD.value
        is_capped = problem.softcap is not None and n_q_tiles <= MOST_CAPPED_TILES
        if (n_q_tiles % 2 and n_q_tiles <= FEW_TILES) or is_capped:
            return LONGEST_FIRST.value
        keys = min(problem.Skv, left + right + plan_of(problem).block_q)
        if key_bytes(problem) * keys <= L2_BYTES * problem.Skv:
            return LONGEST_FIRST.value
    return PAIRED.value


def splits_tiles(problem: AttentionProblem) -> bool:
    """Whether tiles may be split: those of sequences of one length, in default builds. Without a
    mask, the code for it takes longer than it saves between tiles of narrow heads, or of one loop;
    elsewhere, it has not been measured."""
    left, right = problem.window
    is_long = max(problem.D, problem.Dv) > 64 and not plan_of(problem).one_loop
    pays = left is None and (right is not None or is_long)
    is_dense = problem.layout == "dense" and not (problem.has_kv_lens or problem.is_paged)
    return pays and is_dense and not (problem.constant_time or problem.query_invariant)


def is_chunk(problem: AttentionProblem, block_q: int) -> bool:
    """Whether causal tiles, of so many rows, see nearly the same keys, many more than there are
    queries and more than fit into L2."""
    shortest = problem.Skv - problem.Sq + min(block_q, problem.Sq)
    is_alike = shortest >= ALIKE * problem.Skv
    is_alike = is_alike and has_more_keys(problem.Sq, problem.Skv)
    return splits_tiles(problem) and is_alike and key_bytes(problem) > L2_BYTES


def pays_to_pair(heads: int, n_q_tiles: int, processors: int, head_bytes: int) -> bool:
    """Whether pairs of tiles fill the rounds of `processors` programs; `head_bytes` is what a head
    has of keys and values."""
    per_head = -(-n_q_tiles // 2)
    # The tile in the middle is its own pair. If all of those went to the same programs, these would
    # have less to do.
    if n_q_tiles % 2 and n_q_tiles <= FEW_TILES and processors % per_head == 0:
        return False
    # Of fewer rounds than two there would be none: the last one has single tiles, too.
    pairs = heads * per_head
    heads_at_work = min(heads, processors / per_head + 1)
    return pairs >= 2 * processors and heads_at_work * head_bytes <= L2_BYTES


def key_bytes(problem: AttentionProblem) -> int:
    """What all keys and values of a dense call have."""
    return problem.B * problem.Hkv * problem.Skv * (problem.D + problem.Dv) * 2


def deals_singly(problem: AttentionProblem, n_q_tiles: int) -> bool:
    """Whether single tiles are dealt out, longest first, although pairs would fill the rounds."""
    fits = n_q_tiles <= SINGLE_TILES and key_bytes(problem) <= L2_BYTES
    return problem.constant_time and max(problem.D, problem.Dv) <= 64 and fits
