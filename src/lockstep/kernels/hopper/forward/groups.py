"""Which calls have tiles that the query heads of a KV head share, and how many tiles there are.

It changes no bit, so the sizes of a call may decide it. What tells is how many blocks of keys its
programs work through, and how many tiles they begin and end.
"""

from __future__ import annotations

import math
from functools import lru_cache

from lockstep.kernels.hopper.common.sizes import BOX, ROWS
from lockstep.kernels.hopper.forward.plan import PROGRAMS, one_block_keys, plan_of
from lockstep.problem import AttentionProblem

# What the ends of a tile cost, in blocks of keys; and under a causal mask those of a tile that a
# group shares, of heads up to NARROW wide and of wider ones.
ENDS, ENDS_OF_NARROW_CHUNKS, ENDS_OF_CHUNKS = 1.0, 2.0, 1.5
# What a tile under a causal mask costs of which one consumer has all rows, as a part of a full one.
HALF = 0.65
# Tiles of groups have to save this share of the work, since each box is a load and a store of its
# own. Of whole causal sequences they have to save more, and most where tiles of one head are faster
# for their work: without a mask, in one loop.
SAVED, SAVED_OF_WHOLE, SAVED_OF_FAST_TILES = 0.08, 0.11, 0.2
# Of windows they have to save more.
SAVED_OF_WINDOWS = 0.15
# Heads of a box, of windows and of whole causal sequences.
HEADS_OF_BOXES = 4
# Tiles of groups are in one loop, too, if the busiest program has so many blocks. Those of whole
# causal sequences pay then: in boxes of BOX heads even if they have this share of the work more.
BLOCKS_OF_LOOP, ADDED_IN_LOOP = 16, 0.03
# Packed sequences with about as many keys as queries share tiles if they have so few in the mean.
SHORT_PACKED = 256
# From so many queries on, the last tile of a head is next to nothing beside the others.
MANY_QUERIES = 4096
NARROW, MEDIUM, WIDE = 64, 128, 192
# How many times as many keys as queries a causal sequence has to have, unless heads are wider than
# MEDIUM and boxes have several; and how many keys its rows see in the mean, where tiles of one head
# are in one loop, which is faster with fewer.
MORE_KEYS, LEAST_KEYS = 1.5, 256


def heads_of_box(group: int) -> int:
    """How many heads lie in one box of the copy engine, if so many share a tile; 0 where each head
    has tiles of its own."""
    return math.gcd(group, BOX) if group > 1 else 0


def rows_of_group(problem: AttentionProblem) -> int:
    """How many heads share a tile. Of tiles that may have parts, `part_group` says it."""
    return problem.Hq // problem.Hkv if shares_tiles(problem) else 1


def rows_of(queries: int, group: int) -> int:
    """Rows of so many queries of all heads of a group, those of whole boxes."""
    return -(-queries // BOX) * BOX * group if group > 1 else queries


def n_tiles(queries: int, group: int, block_q: int) -> int:
    """Tiles of so many queries of all heads of a group."""
    return -(-rows_of(queries, group) // block_q)


def most_tiles(queries: int, sequences: int, group: int, block_q: int) -> int:
    """How many tiles packed sequences may have, and rows of none, with so many queries in all: each
    may leave a tile unfilled, and a box of it."""
    rows = queries if group == 1 else (queries + (BOX - 1) * (sequences + 1)) * group
    return rows // block_q + sequences + 1


def has_more_keys(queries: int, keys: int) -> bool:
    """Whether keys are so many more than queries that causal ones are a chunk of a sequence."""
    return keys >= MORE_KEYS * queries


@lru_cache(maxsize=256)
def shares_tiles(problem: AttentionProblem) -> bool:
    """Whether the heads of a group share tiles: in default builds, where that saves work."""
    group = problem.Hq // max(problem.Hkv, 1)
    if group == 1 or problem.constant_time or problem.query_invariant:
        return False
    if problem.is_paged:
        # Those of narrower heads take longer, few queries apart: `part_rule.py`.
        return max(problem.D, problem.Dv) > WIDE
    if problem.window[0] is not None:
        # Softcaps have not been measured.
        return problem.softcap is None and _narrows_windows(problem, group)
    width, is_causal = max(problem.D, problem.Dv), problem.window[1] is not None
    is_packed = problem.layout == "varlen"
    # Softcaps of wide heads gain nothing.
    if problem.softcap is not None and width > MEDIUM:
        return False
    has_boxes = math.gcd(group, BOX) >= HEADS_OF_BOXES
    queries, keys = _lengths(problem)
    is_whole = is_causal and not has_more_keys(queries, keys)
    if is_whole and NARROW < width <= MEDIUM:
        return _pays_in_one_loop(problem, queries, keys, group)
    if is_packed and not has_more_keys(queries, keys):
        least = MEDIUM if is_causal or one_block_keys(problem) else NARROW
        return has_boxes and queries <= SHORT_PACKED and width > least
    # Narrower ones gain if they have few queries on many keys, which is rare, for one more build of
    # most models.
    if is_packed and width <= MEDIUM:
        return False
    if queries > MANY_QUERIES:
        return False
    # Their tiles take longer than their blocks do, those of wide heads apart.
    if is_whole and (width <= NARROW or not has_boxes):
        return False
    one_loop = plan_of(problem).one_loop
    if one_loop and keys - queries / 2 < LEAST_KEYS and (is_causal or not has_boxes):
        return False
    apart, shared = (work(problem, queries, keys, n) for n in (1, group))
    is_fast = one_loop and not is_causal and shared < BLOCKS_OF_LOOP
    saved = SAVED_OF_WHOLE if is_whole else SAVED_OF_FAST_TILES if is_fast else SAVED
    return shared <= (1 - saved) * apart


def _lengths(problem: AttentionProblem) -> tuple[int, int]:
    """Queries and keys of a sequence, of packed ones in the mean: only that is known."""
    if problem.layout != "varlen":
        return problem.Sq, problem.Skv
    return -(-problem.Sq // max(problem.B, 1)), -(-problem.Skv // max(problem.B, 1))


def _pays_in_one_loop(problem: AttentionProblem, queries: int, keys: int, group: int) -> bool:
    """Whether whole causal sequences have tiles of groups, all blocks of which are in one loop.
    Softcaps have not been measured."""
    heads = math.gcd(group, BOX)
    if heads < HEADS_OF_BOXES or problem.softcap is not None or one_block_keys(problem):
        return False
    if not plan_of(problem).one_loop:
        return False
    apart, shared = (work(problem, queries, keys, n) for n in (1, group))
    most = 1 + ADDED_IN_LOOP if heads == BOX else 1 - SAVED_OF_WHOLE
    return BLOCKS_OF_LOOP <= shared <= most * apart


@lru_cache(maxsize=256)
def takes_one_loop(problem: AttentionProblem) -> bool:
    """Whether all blocks of a program's tiles are in one loop (`flow.py`)."""
    if not plan_of(problem).one_loop:
        return False
    group = rows_of_group(problem)
    return group == 1 or work(problem, *_lengths(problem), group) >= BLOCKS_OF_LOOP


def _narrows_windows(problem: AttentionProblem, group: int) -> bool:
    """Whether tiles with fewer queries, of more heads, see so much less beside a window that this
    saves work. Sizes of a call do not decide it, so that a model needs no build more."""
    left, right = problem.window
    if left is None or right is None or math.gcd(group, BOX) < HEADS_OF_BOXES:
        return False
    plan = plan_of(problem)
    shared = plan.block_q // group + (BOX if plan.block_q // BOX % group else 0)

    def blocks(queries: int) -> float:
        """The blocks of so many queries, in the mean of all places of a tile, and its ends."""
        return (left + right + queries - 1) / plan.block_kv + 1 + ENDS

    return blocks(shared) <= (1 - SAVED_OF_WINDOWS) * blocks(plan.block_q)


def work(problem: AttentionProblem, queries: int, keys: int, group: int) -> float:
    """What the busiest program of a call has to do, in blocks of keys, if so many heads share a
    tile: its part of all of it, or one tile."""
    plan, rows, ends, half = plan_of(problem), rows_of(queries, group), ENDS, 1.0
    if problem.window[1] is not None:
        half = HALF
        if group > 1:
            is_narrow = max(problem.D, problem.Dv) <= NARROW
            ends = ENDS_OF_NARROW_CHUNKS if is_narrow else ENDS_OF_CHUNKS
    tiles = [
        (blocks_of_tile(problem, queries, keys, row, group, plan.block_q, plan.block_kv) + ends)
        * (half if rows - row <= ROWS else 1.0)
        for row in range(0, rows, plan.block_q)
    ]
    return max(sum(tiles) * problem.B * problem.Hq / group / PROGRAMS, max(tiles, default=0.0))


def blocks_of_tile(
    problem: AttentionProblem,
    queries: int,
    keys: int,
    row: int,
    group: int,
    block_q: int,
    block_kv: int,
) -> int:
    """The blocks of keys that the tile from a row on sees: at least one."""
    left, right = problem.window
    first, last = row, row + block_q - 1
    if group > 1:
        first, last = row // BOX // group * BOX, last // BOX // group * BOX + BOX - 1
    begin, end = 0, keys
    if right is not None:
        end = min(end, last + 1 + keys - queries + right)
    if left is not None:
        begin = min(max(first + keys - queries - left, 0), max(keys - 1, 0)) // block_kv
    return max(-(-max(end, 0) // block_kv), begin + 1) - begin
