"""Sizes of the decode kernels: tiles and rings by head dim, and how long a span of keys is.

BLOCK_KV and the span rule are part of a row's bits: they follow the head dims, the heads and the
lengths of the sequence itself. The other sizes change no bit.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.kernels.hopper.common.query_invariance import BLOCK_KV, SPAN, parts_fit
from lockstep.kernels.hopper.common.sizes import ROWS
from lockstep.kernels.hopper.decode.span_rule import least_of, spans_of
from lockstep.problem import AttentionProblem

# Programs that the spans of one sequence make, if it is long enough; and the keys of a span.
WANTED = 132
LEAST_SPAN, MOST_SPAN = 512, 1024
# Those of more than NARROW_ROWS rows, whose parts are large, have more keys where these are many.
TALL_SPAN = 2048
# Heads of the same keys lie side by side in memory, and are best read at one time.
MOST_TEAM = 8
# Where teams would be so many times smaller than they could be (5 or 7 heads), some SMs have no
# program.
SMALL_TEAM = 3
# SMs that have programs where these share the heads evenly, at most and at least, if heads are no
# fewer than this.
EVEN_PROCESSORS, LEAST_PROCESSORS, EVEN_HEADS = 128, 116, 32
# Columns of a tile that the copy engine writes at once: 128 bytes.
COLUMNS = 64
# A run of spans costs as much as this many tiles of keys more than its tiles.
SPAN_COST = 1
# A span has so many keys for each query row at least, and of tiles of more than 64 columns: parts
# stay few beside keys and values. The latter were faster so.
KEYS_PER_ROW, WIDE_KEYS_PER_ROW = 8, 32
# Sequences with more keys than MOST_SPAN are short if spans of so many keys for each row would be
# this many times fewer than those wanted. In tiles of 128 columns, spans have LEAST_SPAN keys then:
# more SMs are at work.
SHORT = 3
# Rows of a tile up to which half of what a thread does is left out, and of these the first ones:
# `few_rows.py`. Rows up to which warps have products of their own, in tiles of 64 columns only the
# first ones: `narrow_consumer.py`.
UPPER_ROWS, FEW_ROWS, NARROW_ROWS = 32, 8, 16
# Rows that the first kernel folds at once, parts that it loads at once, and how often it may; and
# how often in query-invariant calls, if a head has many programs.
INSIDE_ROWS, INSIDE_PARTS, INSIDE_ROUNDS = 4, 16, 6
INVARIANT_ROUNDS = 2
# Spans of a head that are few.
FEW_SPANS = 4
# Bits of a counter of spans that count; those above are a mark (`folding/arrivals.py`).
COUNT_BITS, MARK_BITS = 20, 42
# Numbers of a row of a part beside its products: m and l; with query_invariant, m and error, and
# from PART_SUMS on the sums of four threads, l and residue.
PART_NUMBERS, INVARIANT_PART_NUMBERS, PART_SUMS = 2, 12, 4
# Registers of a thread of the warp that loads, by those of a thread at launch. The warpgroup that
# attends has what is left, as many as it can have of 168.
PRODUCER_REGISTERS = {128: 48, 168: 80}


@dataclass(frozen=True)
class Plan:
    """Tile sizes and pipeline of one build."""

    block_kv: int
    stages: int
    programs: int  # of one SM
    registers: int  # of a thread at launch


# At head dims 128 and 256, some 100 KB are under way to an SM. With twice as many, some SMs wait
# for others' loads, and end last; and programs of the second kernel find no room beside those of
# the first.
PLANS = {
    64: Plan(block_kv=128, stages=3, programs=2, registers=128),
    128: Plan(block_kv=64, stages=3, programs=1, registers=168),
    192: Plan(block_kv=64, stages=3, programs=1, registers=168),
    256: Plan(block_kv=64, stages=2, programs=1, registers=168),
}
# Of calls that have the narrow consumer alone: no room for the rows of another. At head dim 64, two
# programs fit on an SM beside what warps exchange of up to 8 rows.
NARROW_PLANS = {
    64: PLANS[64],
    128: Plan(block_kv=64, stages=3, programs=1, registers=168),
    192: Plan(block_kv=64, stages=4, programs=1, registers=168),
    256: Plan(block_kv=64, stages=3, programs=1, registers=168),
}
# Of calls that have none but the other consumer: no room for what warps exchange. With a stage more
# at head dim 128, which fits, programs of the second kernel would begin later.
WIDE_PLANS = {
    64: PLANS[64],
    128: Plan(block_kv=64, stages=4, programs=1, registers=168),
    192: Plan(block_kv=64, stages=4, programs=1, registers=168),
    256: Plan(block_kv=64, stages=3, programs=1, registers=168),
}


# Of query-invariant calls, with the blocks of the Hopper forward.
INVARIANT_PLANS = {
    64: Plan(BLOCK_KV, stages=3, programs=2, registers=128),
    128: Plan(BLOCK_KV, stages=2, programs=1, registers=168),
}


def plan_of(problem: AttentionProblem) -> Plan:
    if problem.query_invariant:
        return INVARIANT_PLANS[problem.D]
    columns = _widest(problem)
    if narrow_rows(problem) == 0:
        return WIDE_PLANS[columns]
    return (NARROW_PLANS if is_narrow(problem) else PLANS)[columns]


def is_narrow(problem: AttentionProblem) -> bool:
    """Whether a build has the narrow consumer alone."""
    return not is_ragged(problem) and rows_of(problem) <= narrow_rows(problem)


def query_order(problem: AttentionProblem) -> str:
    """When the queries of a build are asked for (`queries.py`): they were faster so."""
    if problem.query_invariant:
        return "with keys"
    return "prefetched" if _widest(problem) <= 128 else "asked for first"


def columns_of(head_dim: int) -> int:
    """Columns of a tile: more than there are of head dims between its widths."""
    return min(columns for columns in PLANS if columns >= head_dim)


def _widest(problem: AttentionProblem) -> int:
    """Columns of tiles of keys or of values, whichever are more."""
    return columns_of(max(problem.D, problem.Dv))


def is_ragged(problem: AttentionProblem) -> bool:
    """Whether sequences may have more or fewer tiles of query rows than others: packed ones, unless
    none has more rows than a tile."""
    has_bound = problem.max_seqlen_q is not None and rows_of(problem) <= ROWS
    return problem.is_packed and not has_bound


def rows_of(problem: AttentionProblem) -> int:
    """The most query rows of one KV head: the query heads that share it are packed into rows."""
    return problem.longest_q * (problem.Hq // problem.Hkv)


def tile_rows_of(problem: AttentionProblem) -> int:
    """Rows of the tallest tile."""
    return min(ROWS, rows_of(problem))


def few_rows(problem: AttentionProblem) -> int:
    """FEW of a build (`few_rows.py`): the most rows of a query-invariant call; of others whether
    there is a loop for few rows beside that for all: not in wide tiles, nor beside the narrow
    consumer, which is slower with one more loop."""
    if problem.query_invariant:
        return FEW_ROWS if rows_of(problem) <= FEW_ROWS else 0
    return UPPER_ROWS if _widest(problem) <= 128 and narrow_rows(problem) == 0 else 0


def narrow_rows(problem: AttentionProblem) -> int:
    """Rows up to which a sequence has the narrow consumer. Where no sequence has more, fewer in
    builds for fewer; where all have as many, 0 in builds without it."""
    most, rows = _most_narrow_rows(problem), rows_of(problem)
    if is_ragged(problem) or problem.query_invariant:
        return most
    if rows > most:
        return most if problem.is_packed else 0
    return FEW_ROWS if rows <= FEW_ROWS else most


def _most_narrow_rows(problem: AttentionProblem) -> int:
    """Rows that have the narrow consumer, if a sequence has no more."""
    if problem.query_invariant:
        return 0
    return FEW_ROWS if _widest(problem) == 64 else NARROW_ROWS


def prefetches(problem: AttentionProblem) -> bool:
    """Whether there is code that prepares the next sequence, where these are many: faster at head
    dim 128, slower at 64, where it takes registers from the warpgroup."""
    is_plain = problem.layout == "paged" and not problem.query_invariant
    return is_plain and _has_128_columns(problem)


def starts_late(problem: AttentionProblem) -> bool:
    """Whether the second kernel starts when the last loads are under way, and not at once: faster
    at head dim 128, slower in query-invariant calls."""
    return prefetches(problem)


def folds_inside(problem: AttentionProblem, n_programs: int) -> bool:
    """Whether programs fold what they have cut of few rows (`folding/arrivals.py`), in place of a
    second kernel: faster where a head has no more than two programs and few parts, and slower at
    head dim 64, unless a window leaves few keys; where there are few spans of several heads; and
    where no head can be cut. In query-invariant calls, whose second kernel is slower, it is faster
    with more programs to a head, too, if parts are few. That changes no bit."""
    if rows_of(problem) > FEW_ROWS:
        return False
    rounds, spans = _rounds_inside(problem), most_spans(problem)
    is_few = has_few_spans(problem) and problem.Hkv > 1
    has_two = 2 * tiles_of(problem) * problem.Hkv >= n_programs or spans <= 2
    if problem.query_invariant:
        return problem.D == 128 and rounds <= (INSIDE_ROUNDS if has_two else INVARIANT_ROUNDS)
    if spans == 1 or is_few:
        return True
    if not has_two or rounds > INSIDE_ROUNDS:
        return False
    return columns_of(problem.D) > 64 or problem.window[0] is not None


def _rounds_inside(problem: AttentionProblem) -> int:
    """How often a program that folds the longest possible head waits for parts: each time it loads
    INSIDE_PARTS of them, or half as many, for INSIDE_ROWS rows."""
    is_large = problem.query_invariant or columns_of(problem.Dv) > 128
    parts = INSIDE_PARTS // 2 if is_large else INSIDE_PARTS
    return -(-tile_rows_of(problem) // INSIDE_ROWS) * -(-most_spans(problem) // parts)


def _has_128_columns(problem: AttentionProblem) -> bool:
    """Whether tiles of keys and of values have 128 columns, of one head dim."""
    return columns_of(problem.Dv) == columns_of(problem.D) == 128


def query_tiles_of(problem: AttentionProblem) -> int:
    """Tiles of query rows of a sequence whose queries are not packed."""
    return -(-rows_of(problem) // ROWS)


def tiles_of(problem: AttentionProblem) -> int:
    """Tiles of query rows; of ragged queries, those for which there is room."""
    return room_of(problem) if is_ragged(problem) else problem.B * query_tiles_of(problem)


def room_of(problem: AttentionProblem) -> int:
    """Tiles of query rows for which there is room."""
    if not problem.is_packed:
        return tiles_of(problem)
    # One spare tile for each sequence, and those of the rows behind the last.
    rows = problem.Sq * (problem.Hq // problem.Hkv)
    return (rows // ROWS if is_ragged(problem) else 0) + problem.B + 1


def programs_of(problem: AttentionProblem, n_processors: int) -> int:
    """How many programs there are: one or two on each SM, or fewer that make whole teams, where
    these share the heads of equally long sequences evenly, or where teams would be small. That
    changes no bit."""
    team = max(n for n in range(1, MOST_TEAM + 1) if problem.Hkv % n == 0)
    each = plan_of(problem).programs
    one_each = min(n_processors, EVEN_PROCESSORS) // (team * each) * team * each
    if each > 1 and one_each and has_few_spans(problem):
        return one_each
    fewer = min(n_processors, EVEN_PROCESSORS) // team * team * each
    if fewer > 0 and not is_ragged(problem):
        if _is_even(problem, fewer):
            return fewer
        # Where a team has a part of the heads only, all of a sequence are read at one time then.
        counts = range(fewer, LEAST_PROCESSORS * each - 1, -team * each)
        even = (n for n in counts if problem.Hkv > team and _is_exactly_even(problem, n))
        found = next(even, 0)
        if found:
            return found
    is_small = team_of(problem, n_processors * each) * SMALL_TEAM <= team <= n_processors
    return (n_processors // team * team if is_small else n_processors) * each


def has_few_spans(problem: AttentionProblem) -> bool:
    """Whether a call with few rows has few spans of each head, and no more of all heads than there
    are SMs. It is faster with a program to an SM, and with what it has cut folded inside."""
    if problem.query_invariant or is_ragged(problem) or rows_of(problem) > FEW_ROWS:
        return False
    spans = most_spans(problem)
    return spans <= FEW_SPANS and tiles_of(problem) * problem.Hkv * spans <= WANTED


def _is_even(problem: AttentionProblem, n_programs: int) -> bool:
    """Whether each program has as many whole heads as the others, or a span less; or each head as
    many programs."""
    if _is_exactly_even(problem, n_programs):
        return True
    n_heads, span = tiles_of(problem) * problem.Hkv, least_span(problem)
    if n_programs % n_heads == 0:
        return False
    block = plan_of(problem).block_kv
    cost = -(-problem.Skv // block) + -(-problem.Skv // span) * SPAN_COST
    most = -(-n_heads // n_programs) * cost
    return most * n_programs - n_heads * cost <= (span // block + SPAN_COST) * n_programs


def _is_exactly_even(problem: AttentionProblem, n_programs: int) -> bool:
    """Whether each program has as many whole heads as the others, or each of many heads as many
    programs."""
    n_heads = tiles_of(problem) * problem.Hkv
    return n_heads % n_programs == 0 or (n_programs % n_heads == 0 and n_heads >= EVEN_HEADS)


def team_of(problem: AttentionProblem, n_programs: int) -> int:
    """Heads that as many programs work on side by side."""
    team = range(1, MOST_TEAM + 1)
    return max(n for n in team if problem.Hkv % n == n_programs % n == 0)


def spans_wanted(problem: AttentionProblem) -> int:
    """`spans_of` of a problem, the most of any sequence of packed queries."""
    if problem.query_invariant:
        return problem.Skv
    tiles = 1 if problem.is_packed else query_tiles_of(problem)
    return int(spans_of.fn(problem.Hkv * tiles, WANTED))


def least_span(problem: AttentionProblem) -> int:
    """`least_of` of a problem, the least of any sequence of packed queries."""
    if problem.query_invariant:
        return SPAN
    rows = tile_rows_of(problem)
    if problem.is_packed:
        # Those of one query.
        rows = 1 if is_ragged(problem) else problem.Hq // problem.Hkv
    return int(least_of.fn(rows, keys_per_row(problem), LEAST_SPAN, MOST_SPAN))


def least_of_short(problem: AttentionProblem) -> int:
    """The least keys of a span of short sequences, if they would be more otherwise: the same for
    packed queries, of which some sequences have few."""
    return LEAST_SPAN if _widest(problem) <= 128 else MOST_SPAN


def most_of_tall(problem: AttentionProblem) -> int:
    """The most keys of a span of more rows than the narrow consumer takes."""
    return MOST_SPAN if problem.query_invariant else TALL_SPAN


def keys_per_row(problem: AttentionProblem) -> int:
    """How many keys a span has at least for each query row."""
    return KEYS_PER_ROW if _widest(problem) == 64 else WIDE_KEYS_PER_ROW


def keeps_whole(problem: AttentionProblem) -> bool:
    """Whether a tile of query rows has one program for all its keys: parts of tall tiles would take
    too much memory where spans are short."""
    return problem.query_invariant and not parts_fit(problem)


def most_spans(problem: AttentionProblem) -> int:
    """The most spans that are handed out for a row of the problem."""
    return 1 if keeps_whole(problem) else _parts(problem)


def _parts(problem: AttentionProblem) -> int:
    keys = _most_keys_seen(problem)
    wanted, fewest = spans_wanted(problem), -(-keys // MOST_SPAN)
    if is_ragged(problem):
        # Sequences of several tiles want fewer, and have at most as many more than the fewest.
        wanted += max(fewest - 1, 0)
    else:
        wanted *= max(-(-fewest // wanted), 1)
    # One more where a window begins in the middle of a span.
    more = problem.query_invariant or problem.window[0] is not None
    # Up to MOST_SPAN keys, no sequence is short: one span is enough.
    least = least_span(problem)
    if keys > MOST_SPAN:
        least = min(least, least_of_short(problem))
    return min(wanted, -(-keys // least)) + more


def _most_keys_seen(problem: AttentionProblem) -> int:
    """The most keys of a sequence that its queries see between them. Of ragged queries the host
    does not know how many a sequence has."""
    left = problem.window[0]
    if left is None or is_ragged(problem):
        return problem.Skv
    return min(problem.Skv, problem.longest_q + left)
