"""Which program computes which spans of keys.

All spans of all heads and sequences stand in one line, sequence after sequence, head after head, by
what they cost: their tiles of keys, and SPAN_COST for each span. The line is cut into as many equal
stretches as there are programs, and a program takes the spans that begin in its own. So long and
short sequences share the SMs evenly, whatever their order. Lengths are read on the device.

A *run* is what a program has of one head of one sequence. A run of all its spans is folded by the
program itself; the parts of others are handed out, and folded by `fold.py`.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.mailbox import Mailbox
from lockstep.kernels.hopper.decode import plan

MOST_SPAN = gl.constexpr(plan.MOST_SPAN)
SHORT, SPAN_COST = gl.constexpr(plan.SHORT), gl.constexpr(plan.SPAN_COST)
# Sequences that are looked at together.
CHUNK = gl.constexpr(128)
# Runs that the producer may be ahead.
RUNS_AHEAD = gl.constexpr(8)


@aggregate
class Sizes:
    """Sizes and masks of one launch."""

    kv_lens_ptr: gl.tensor
    kv_starts_ptr: gl.tensor
    B: gl.tensor
    heads: gl.tensor  # tiles of query rows over all KV heads of a sequence
    q_tiles: gl.tensor  # of one KV head
    Sq: gl.tensor
    Skv: gl.tensor
    left: gl.tensor
    right: gl.tensor
    wanted: gl.tensor  # spans of a head, and the least keys of one
    least: gl.tensor
    whole: gl.tensor  # 1 if each tile of query rows is one program's, 0 if its spans are shared
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_STARTS: gl.constexpr
    BLOCK_KV: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pointers, numbers, HAS_LEFT, HAS_RIGHT, HAS_STARTS, BLOCK_KV):
        self.kv_lens_ptr = pointers[0]
        self.kv_starts_ptr = pointers[1]
        self.B = numbers[0]
        self.heads = numbers[1]
        self.q_tiles = numbers[2]
        self.Sq = numbers[3]
        self.Skv = numbers[4]
        self.left = numbers[5]
        self.right = numbers[6]
        self.wanted = numbers[7]
        self.least = numbers[8]
        self.whole = numbers[9]
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_STARTS = gl.constexpr(HAS_STARTS)
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)

    @gluon.jit
    def keys_of(self, b, mask):
        """How many keys sequence b has, or several, 0 if a number is wrong; and whether none is."""
        end = gl.load(self.kv_lens_ptr + b, mask=mask, other=0)
        is_good = (end >= 0) & (end <= self.Skv)
        length = end
        if self.HAS_STARTS:
            start = gl.load(self.kv_starts_ptr + b, mask=mask, other=0)
            is_good = is_good & (start >= 0) & (start <= end)
            length = end - start
        return gl.where(is_good, length, 0).to(gl.int32), is_good

    @gluon.jit
    def keys_seen(self, kv_len):
        """Keys [lo, hi) outside which no row of a sequence sees anything, 0 <= lo <= hi."""
        lo = kv_len * 0
        hi = kv_len
        if self.HAS_LEFT:
            lo = gl.minimum(gl.maximum(kv_len - self.Sq - self.left, 0), kv_len)
        if self.HAS_RIGHT:
            hi = gl.maximum(gl.minimum(kv_len + self.right, kv_len), lo)
        return lo, hi

    @gluon.jit
    def tiles_of(self, kv_len):
        """Of a sequence, or of several: the first tile seen, the one behind the last, the tiles of
        a span, and the number of spans, at least 1."""
        lo, hi = self.keys_seen(kv_len)
        reach = hi - lo
        span = gl.cdiv(gl.cdiv(reach, self.wanted), self.BLOCK_KV) * self.BLOCK_KV
        span = gl.minimum(gl.maximum(span, self.least), MOST_SPAN)
        span = gl.where(reach <= SHORT, SHORT, span)
        begin = lo // self.BLOCK_KV
        end = gl.maximum(gl.cdiv(hi, self.BLOCK_KV), begin)
        n_spans = gl.maximum(gl.cdiv(hi, span) - lo // span, 1)
        return begin, end, span // self.BLOCK_KV, n_spans

    @gluon.jit
    def work_of(self, kv_len):
        """The cost of one tile of query rows."""
        begin, end, _span, n_spans = self.tiles_of(kv_len)
        return end - begin + n_spans * SPAN_COST

    @gluon.jit
    def stretch(self):
        """A warp: the length of the line, where this program's stretch of it begins and ends, the
        sequence in which it begins, and where that one begins."""
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        total = self.B * 0
        for first in range(0, self.B, CHUNK):
            total += gl.sum(self.work_of_some(first, layout), 0)
        program = gl.program_id(0).to(gl.int64)
        stretch_begin = (program * total // gl.num_programs(0)).to(gl.int32)
        stretch_end = ((program + 1) * total // gl.num_programs(0)).to(gl.int32)
        b = self.B * 0
        begin = self.B * 0
        seen = self.B * 0
        for first in range(0, self.B, CHUNK):
            work = self.work_of_some(first, layout)
            ends = seen + gl.associative_scan(work, 0, _add)
            is_before = (ends <= stretch_begin) & (work > 0)
            b += gl.sum(is_before.to(gl.int32), 0)
            begin += gl.sum(gl.where(is_before, work, 0), 0)
            seen += gl.sum(work, 0)
        return total, stretch_begin, stretch_end, b, begin

    @gluon.jit
    def work_of_some(self, first, layout: gl.constexpr):
        """The cost [CHUNK] of the sequences from `first` on, 0 beyond the last."""
        b = first + gl.arange(0, CHUNK, layout)
        length, _is_good = self.keys_of(b, b < self.B)
        work = self.work_of(length) * self.heads
        return gl.where(b < self.B, work, 0)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def first_span_from(place, begin, span):
    """The first span that begins `place` or more behind the begin of its head, whose first tile is
    number `begin`; `span` is in tiles."""
    missing = begin % span  # tiles of the first span that are not seen
    return gl.where(place <= 0, 0, gl.cdiv(place + missing, span + SPAN_COST))


@gluon.jit
def spans_before(sizes, place, begin, span, n_spans):
    """How many of the spans of a head begin less than `place` behind its begin; all of them, or
    none, where a head is one program's."""
    all_or_none = gl.where(place <= 0, 0, n_spans)
    some = gl.minimum(first_span_from(place, begin, span), n_spans)
    return gl.where(sizes.whole != 0, all_or_none, some)


@aggregate
class Run:
    """Spans of one tile of query rows that one program computes."""

    exists: gl.tensor
    b: gl.tensor
    head: gl.tensor  # KV head
    q_tile: gl.tensor
    begin: gl.tensor  # tiles of keys
    end: gl.tensor
    span: gl.tensor  # tiles of a span
    first_span: gl.tensor  # counted from the first that is seen
    kv_len: gl.tensor  # -1 if it is wrong
    slot: gl.tensor  # where its parts go; if these are all spans, -1 less that, and folded here

    @gluon.constexpr_function
    def __init__(self, numbers):
        self.exists = numbers[0]
        self.b = numbers[1]
        self.head = numbers[2]
        self.q_tile = numbers[3]
        self.begin = numbers[4]
        self.end = numbers[5]
        self.span = numbers[6]
        self.first_span = numbers[7]
        self.kv_len = numbers[8]
        self.slot = numbers[9]


@aggregate
class RunQueue:
    """The producer writes which run is next, the consumer reads it."""

    mailbox: Mailbox

    @gluon.constexpr_function
    def __init__(self, mailbox):
        self.mailbox = mailbox

    @gluon.jit
    def create():
        return RunQueue(Mailbox.create(10, 1, RUNS_AHEAD))

    @gluon.jit
    def post(self, n, numbers):
        self.mailbox.post(n, numbers)

    @gluon.jit
    def read(self, n):
        self.mailbox.wait(n)
        run = Run(
            (
                self.mailbox.field(n, 0),
                self.mailbox.field(n, 1),
                self.mailbox.field(n, 2),
                self.mailbox.field(n, 3),
                self.mailbox.field(n, 4),
                self.mailbox.field(n, 5),
                self.mailbox.field(n, 6),
                self.mailbox.field(n, 7),
                self.mailbox.field(n, 8),
                self.mailbox.field(n, 9),
            )
        )
        self.mailbox.release(n)
        return run
