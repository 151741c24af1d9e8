"""Which program computes which spans of keys.

All spans of all tiles of query rows stand in one line, by what they cost: their tiles of keys, and
SPAN_COST for each span. A sequence is one tile, or several where a KV head has more than ROWS rows.
The line is cut into as many equal stretches as there are teams of programs, and a team takes the
spans that begin in its own. So long and short sequences share the SMs evenly, whatever their order.
Lengths are read on the device. The programs of a team have as many heads, side by side: keys of all
heads lie side by side in memory. Where there are more heads than programs in a team, a tile stands
in the line once for each team of heads.

Where heads cost about the same, and as many for each team are no more than a span above its share,
none is cut: each counts as much as the longest then, and nothing is left to fold.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import divide, divide_up
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.decode import plan, tiles

MOST_SPAN = gl.constexpr(plan.MOST_SPAN)
SPAN_COST, SHORT = gl.constexpr(plan.SPAN_COST), gl.constexpr(plan.SHORT)
TALL_ROWS = gl.constexpr(plan.NARROW_ROWS)
FIELDS, KV_LEN, N_Q = (gl.constexpr(x) for x in (tiles.FIELDS, tiles.KV_LEN, tiles.N_Q))
SPANS, LEAST = gl.constexpr(tiles.SPANS), gl.constexpr(tiles.LEAST)
BEFORE, BEHIND = gl.constexpr(tiles.BEFORE), gl.constexpr(tiles.BEHIND)
# Sequences that are looked at together, where they are few and where they are many: each look waits
# for memory.
FEW, MANY = gl.constexpr(64), gl.constexpr(128)


@aggregate
class Sizes:
    """Sizes and masks of one launch."""

    kv_lens_ptr: gl.tensor  # [B], or the table of tiles (`tiles.py`)
    kv_starts_ptr: gl.tensor  # [B]
    B: gl.tensor  # tiles of query rows
    heads: gl.tensor  # KV heads
    Sq: gl.tensor
    Skv: gl.tensor
    left: gl.tensor
    right: gl.tensor
    wanted: gl.tensor  # spans of a head
    least: gl.tensor  # keys of a span, also of short sequences, and the most of tall tiles
    least_of_short: gl.tensor
    most_of_tall: gl.tensor
    team: gl.tensor  # programs that work on as many heads side by side
    waves: gl.tensor  # programs of one SM
    q_tiles: gl.tensor  # tiles of query rows of a sequence, and query heads of a KV head
    group: gl.tensor
    whole: gl.tensor  # 1 if each tile of query rows is one program's, 0 if its spans are shared
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_STARTS: gl.constexpr
    PACKED: gl.constexpr  # tiles are in a table
    BLOCK_KV: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pointers, numbers, HAS_LEFT, HAS_RIGHT, HAS_STARTS, PACKED, BLOCK_KV):
        self.kv_lens_ptr, self.kv_starts_ptr = pointers
        (
            self.B, self.heads, self.Sq, self.Skv, self.left, self.right, self.wanted, self.least,
            self.least_of_short, self.most_of_tall, self.team, self.waves, self.q_tiles, self.group,
            self.whole,
        ) = numbers  # fmt: skip
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_STARTS = gl.constexpr(HAS_STARTS)
        self.PACKED = gl.constexpr(PACKED)
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)

    @gluon.jit
    def find_tile(self, b):
        """The sequence of a tile, and the number of the tile in it, where none is packed."""
        sequence = b
        q_tile = b * 0
        if self.q_tiles > 1:
            sequence = divide(b, self.q_tiles)
            q_tile = b - sequence * self.q_tiles
        return sequence, q_tile

    @gluon.jit
    def look_at(self, b, is_there):
        """Looks up tiles: how many keys their sequences have, -1 if a number is wrong; how many
        queries; the spans wanted of a head, 0 if there is no such tile; the least keys of a span;
        and how many queries of the sequence are before and behind those of the tile."""
        if self.PACKED:
            at = self.kv_lens_ptr + b * FIELDS
            kv_len = gl.load(at + KV_LEN, mask=is_there, other=0)
            n_q = gl.load(at + N_Q, mask=is_there, other=0)
            wanted = gl.load(at + SPANS, mask=is_there, other=0)
            least = gl.load(at + LEAST, mask=is_there, other=1)
            before = gl.load(at + BEFORE, mask=is_there, other=0)
            behind = gl.load(at + BEHIND, mask=is_there, other=0)
        else:
            sequence, q_tile = self.find_tile(b)
            end = gl.load(self.kv_lens_ptr + sequence, mask=is_there, other=0)
            is_good = (end >= 0) & (end <= self.Skv)
            length = end
            if self.HAS_STARTS:
                start = gl.load(self.kv_starts_ptr + sequence, mask=is_there, other=0)
                is_good = is_good & (start >= 0) & (start <= end)
                length = end - start
            kv_len = gl.where(is_good, length, -1).to(gl.int32)
            n_q = self.Sq
            wanted = gl.where(is_there, self.wanted, 0)
            least = self.least
            before = b * 0
            behind = b * 0
            if self.q_tiles > 1:
                n_rows = gl.minimum((q_tile + 1) * ROWS, self.Sq * self.group)
                before = divide(q_tile * ROWS, self.group)
                behind = self.Sq - 1 - divide(n_rows - 1, self.group)
        return kv_len, n_q, wanted, least, before, behind

    @gluon.jit
    def keys_seen(self, kv_len, n_q, before, behind):
        """Keys [lo, hi) outside which no query sees anything, 0 <= lo <= hi, but for those `before`
        and `behind` some of a sequence."""
        lo = kv_len * 0
        hi = kv_len
        if self.HAS_LEFT:
            lo = gl.minimum(gl.maximum(kv_len - n_q + before - self.left, 0), kv_len)
        if self.HAS_RIGHT:
            hi = gl.maximum(gl.minimum(kv_len - behind + self.right, kv_len), lo)
        return lo, hi

    @gluon.jit
    def tiles_of(self, found):
        """The first tile seen, the one behind the last, the tiles of a span, and the number of
        spans, at least 1; from what `look_at` has found."""
        given_len, n_q, wanted, least, before, behind = found
        kv_len = gl.maximum(given_len, 0)
        # All queries of a sequence have the same spans.
        lo, hi = self.keys_seen(kv_len, n_q, 0, 0)
        reach = hi - lo
        span = divide_up(reach, gl.maximum(wanted, 1))
        # Of keys that are more than one span for each program, all have as many: one sequence alone
        # would leave some with one more than others.
        most = gl.where(n_q * self.group > TALL_ROWS, self.most_of_tall, MOST_SPAN)
        span = divide_up(span, gl.maximum(divide_up(span, most), 1))
        span = gl.cdiv(span, self.BLOCK_KV) * self.BLOCK_KV
        is_short = (reach > MOST_SPAN) & (reach * SHORT <= wanted * least)
        least = gl.where(is_short, gl.minimum(least, self.least_of_short), least)
        span = gl.minimum(gl.maximum(span, least), most)
        lo, hi = self.keys_seen(kv_len, n_q, before, behind)
        begin = lo // self.BLOCK_KV
        end = gl.maximum(gl.cdiv(hi, self.BLOCK_KV), begin)
        n_spans = divide_up(hi, span)
        if self.HAS_LEFT:
            n_spans = n_spans - divide(lo, span)
        n_spans = gl.maximum(n_spans, 1)
        return begin, end, span // self.BLOCK_KV, n_spans

    @gluon.jit
    def place(self):
        """The place of this program's team in the line, and how many teams there are."""
        n_teams = divide(gl.num_programs(0), self.team)
        team = divide(gl.program_id(0), self.team)
        first = divide_up(n_teams, self.waves)
        wave = divide(team, first)
        return (team - wave * first) * self.waves + wave, n_teams

    @gluon.jit
    def stretch(self):
        """A warp: the length of the line, where this program's stretch of it begins and ends, the
        sequence in which it begins, where that one begins, and what each head counts as if none is
        cut, 0 if each counts as what it costs."""
        if self.B <= FEW:
            total, begin, end, b, b_begin, even = self.stretch_of_few(FEW)
        elif self.B <= MANY:
            total, begin, end, b, b_begin, even = self.stretch_of_few(MANY)
        else:
            total, begin, end, b, b_begin, even = self.stretch_of_many()
        return total, begin, end, b, b_begin, even

    @gluon.jit
    def stretch_of_few(self, N: gl.constexpr):
        """`stretch` of up to N sequences, all of which are looked at together."""
        work, is_there = self.work_of_some(0, N)
        count = gl.sum((work > 0).to(gl.int32), 0)
        total, begin, end, even, counted = self.line(gl.sum(work, 0), gl.max(work, 0), count)
        b, b_begin = count_before(begin, 0, count_as(work, counted), is_there)
        return total, begin, end, b, b_begin, even

    @gluon.jit
    def stretch_of_many(self):
        """`stretch`, with MANY sequences looked at together, and all of them twice: the code for
        more at once would be longer, and is loaded before the first keys are."""
        total = self.B * 0
        most = self.B * 0
        count = self.B * 0
        for first in range(0, self.B, MANY):
            work, _is_there = self.work_of_some(first, MANY)
            total += gl.sum(work, 0)
            most = gl.maximum(most, gl.max(work, 0))
            count += gl.sum((work > 0).to(gl.int32), 0)
        total, begin, end, even, counted = self.line(total, most, count)
        b = self.B * 0
        b_begin = self.B * 0
        seen = self.B * 0
        for first in range(0, self.B, MANY):
            work, is_there = self.work_of_some(first, MANY)
            work = count_as(work, counted)
            n, length = count_before(begin, seen, work, is_there)
            b += n
            b_begin += length
            seen += gl.sum(work, 0)
        return total, begin, end, b, b_begin, even

    @gluon.jit
    def line(self, total, most, count):
        """The length of the line, if all `count` sequences have work `total` and one has `most`;
        where this program's stretch of it begins and ends; and what each head and each sequence
        counts as, 0 if each counts as what it costs."""
        place, n_teams = self.place()
        blocks = divide(self.heads, self.team)
        even = self.even_work(divide(most, blocks), count * blocks, divide(total, n_teams), n_teams)
        total = gl.where(even > 0, most * count, total)
        begin = stretch_of(place, total, n_teams)
        return total, begin, stretch_of(place + 1, total, n_teams), even, even * blocks

    @gluon.jit
    def even_work(self, most, n_heads, share, n_teams):
        """What each head counts as if none is cut: as the one that costs `most`, if no team has
        more than a span above its share with as many heads as others have; else 0."""
        largest = divide_up(n_heads, n_teams) * most
        span = self.least // self.BLOCK_KV + SPAN_COST
        return gl.where(largest - share <= span, most, 0)

    @gluon.jit
    def work_of_some(self, first, CHUNK: gl.constexpr):
        """The cost [CHUNK] of the sequences from `first` on, 0 beyond the last, and whether there
        are these."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        b = first + gl.arange(0, CHUNK, layout)
        found = self.look_at(b, b < self.B)
        begin, end, _span, n_spans = self.tiles_of(found)
        work = (end - begin + n_spans * SPAN_COST) * divide(self.heads, self.team)
        return gl.where(found[2] > 0, work, 0), b < self.B


@gluon.jit
def count_as(work, even):
    """The work of tiles of query rows: for each that there is `even`, unless this is 0."""
    return gl.where((even > 0) & (work > 0), even, work)


@gluon.jit
def count_before(place, seen, work, is_there):
    """How many sequences of a chunk that begins at `seen` end before `place`, and their work."""
    ends = seen + gl.associative_scan(work, 0, _add)
    is_before = (ends <= place) & is_there
    return gl.sum(is_before.to(gl.int32), 0), gl.sum(gl.where(is_before, work, 0), 0)


@gluon.jit
def stretch_of(place, total, n_teams):
    """Where the stretch of a team begins: the first ones are longer by 1 than the others."""
    length = divide(total, n_teams)
    return place * length + gl.minimum(place, total - length * n_teams)


@gluon.jit
def place_at(at, total, n_teams):
    """The place of the team in whose stretch `at` lies."""
    length = divide(total, n_teams)
    n_longer = total - length * n_teams
    behind = at - n_longer * (length + 1)
    of_others = n_longer + divide(behind, gl.maximum(length, 1))
    return gl.where(behind < 0, divide(at, length + 1), of_others)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def first_span_from(sizes, place, begin, span):
    """The first span that begins `place` or more behind the begin of its head, whose first tile is
    number `begin`; `span` is in tiles."""
    missing = begin  # tiles of the first span that are not seen
    if sizes.HAS_LEFT:
        missing = begin - divide(begin, span) * span
    return gl.where(place <= 0, 0, divide_up(place + missing, span + SPAN_COST))


@gluon.jit
def spans_before(sizes, place, begin, span, n_spans, is_whole):
    """How many of the spans of a head begin less than `place` behind its begin; all of them, or
    none, if the head is one program's."""
    all_or_none = gl.where(place <= 0, 0, n_spans)
    some = gl.minimum(first_span_from(sizes, place, begin, span), n_spans)
    return gl.where(is_whole, all_or_none, some)
