"""Sizes and masks of a launch of the backward: which sequence owns a tile, and which tiles see it.

A slot is a place for a tile of one head (`call.Cut`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.sequences import checked_length

# Of a span: one for each thread of both consumers.
SIGNALS = gl.constexpr(256)


@aggregate
class Sizes:
    """Sizes, masks and lengths of one launch."""

    q_slots: gl.tensor  # of a head of queries, for tiles of statistics
    H: gl.tensor  # heads of a sequence that own tiles: Hkv where programs own keys, else Hq
    heads_per_kv: gl.tensor
    B: gl.tensor
    Sq: gl.tensor
    Skv: gl.tensor
    left: gl.tensor
    right: gl.tensor
    kv_batch_rows: gl.tensor  # from one batch to the next in a clipped tensor map of k and v
    bounds_ptr: gl.tensor  # of packed sequences: `rows.py`
    kv_lens_ptr: gl.tensor
    # Of queries that are shared out (`shares.py`): where the sums of each share go, how this is
    # done in each sequence, or in all of them.
    shares_ptr: gl.tensor
    plan_ptr: gl.tensor
    share_heads: gl.tensor
    span_tiles: gl.tensor
    spans: gl.tensor
    n_shares: gl.tensor
    # Of loops that are cut (`cuts.py`), and how many threads have stored sums of each of them.
    n_cut: gl.tensor
    first_cut: gl.tensor
    cut_from: gl.tensor
    carried_ptr: gl.tensor
    LAYOUT: gl.constexpr  # "dense", "kv_lens" or "varlen"
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    HAS_EDGE: gl.constexpr  # the last key tile may be cut short
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr
    CONSTANT_TIME: gl.constexpr  # no step depends on data: `nonfinite.py`, `narrow/steps.py`
    SHARED: gl.constexpr  # queries may be shared out
    CUT: gl.constexpr  # loops may be cut

    @gluon.constexpr_function
    def __init__(
        self, numbers, bounds_ptr, kv_lens_ptr, LAYOUT, HAS_LEFT, HAS_RIGHT, HAS_EDGE, BLOCK_Q,
        BLOCK_KV, CONSTANT_TIME=False, shares=None, plan_ptr=None, cuts=None,
    ):  # fmt: skip
        (
            self.q_slots, self.H, self.heads_per_kv, self.B, self.Sq, self.Skv, self.left,
            self.right, self.kv_batch_rows,
        ) = numbers  # fmt: skip
        # A pointer that the layout does not need is None: any tensor will do in its place.
        self.bounds_ptr = bounds_ptr if LAYOUT == "varlen" else self.B
        self.kv_lens_ptr = kv_lens_ptr if LAYOUT == "kv_lens" else self.B
        self.plan_ptr = self.B if LAYOUT == "dense" or shares is None else plan_ptr
        self.shares_ptr, self.share_heads, self.span_tiles, self.spans, self.n_shares = (
            (self.B,) * 5 if shares is None else shares
        )
        self.n_cut, self.first_cut, self.cut_from, self.carried_ptr = (
            (self.B,) * 4 if cuts is None else cuts
        )
        self.LAYOUT = gl.constexpr(LAYOUT)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.HAS_EDGE = gl.constexpr(HAS_EDGE)
        self.BLOCK_Q = gl.constexpr(BLOCK_Q)
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.CONSTANT_TIME = gl.constexpr(CONSTANT_TIME)
        self.SHARED = gl.constexpr(shares is not None and cuts is None)
        self.CUT = gl.constexpr(cuts is not None)

    @gluon.jit
    def carried(self, share, SIZE: gl.constexpr):
        """What consumers have to know of a span (`QueryLoop.share`): how many signals there are
        when the sums it begins with are there, whether it leaves its own to another one, and the
        addresses of the sums and of the number of signals, in halves."""
        number = gl.maximum(share, 0) // self.spans
        span = gl.maximum(share, 0) - number * self.spans
        goes_on = (share >= 0) & (span + 1 < self.spans)
        sums = (self.shares_ptr + number.to(gl.int64) * SIZE).to(gl.int64)
        signals = (self.carried_ptr + number).to(gl.int64)
        return (
            span * SIGNALS,
            goes_on.to(gl.int32),
            sums.to(gl.int32),
            (sums >> 32).to(gl.int32),
            signals.to(gl.int32),
            (signals >> 32).to(gl.int32),
        )

    @gluon.jit
    def counted_slots(self):
        """How many slots packed sequences have, whose queries may be shared out: `rows.py`."""
        return gl.load(self.plan_ptr + (self.B + 1))

    @gluon.jit
    def locate(self, slot, head, BY_KEYS: gl.constexpr):
        """Whose tile a slot is: the sequence and the head in it, its first query and key in the
        tensors, its lengths, and whether it is good. `head` counts through all sequences, H to
        each, unless they are packed; slots then go by their offsets of keys, or of queries, or
        by the plan where queries may be shared out. A bad sequence that is not packed has no
        keys."""
        if self.LAYOUT == "varlen":
            # Offsets of queries, of keys, and which sequences are good: `rows.py`.
            cu_q_ptr = self.bounds_ptr
            cu_kv_ptr = self.bounds_ptr + (self.B + 2)
            BLOCK: gl.constexpr = self.BLOCK_KV if BY_KEYS else self.BLOCK_Q
            if BY_KEYS and self.SHARED:
                batch = find_sequence(slot, self.plan_ptr, self.B + 1, 1, 0)
            else:
                cu_ptr = cu_kv_ptr if BY_KEYS else cu_q_ptr
                batch = find_sequence(slot, cu_ptr, self.B + 1, BLOCK, 1)
            q_start = gl.load(cu_q_ptr + batch)
            kv_start = gl.load(cu_kv_ptr + batch)
            len_q = gl.load(cu_q_ptr + batch + 1) - q_start
            len_kv = gl.load(cu_kv_ptr + batch + 1) - kv_start
            is_good = gl.load(cu_kv_ptr + (self.B + 2) + batch) != 0
        else:
            batch = head // self.H
            head = head % self.H
            q_start = batch * 0
            kv_start = batch * 0
            len_q = self.Sq
            len_kv = self.Skv
            is_good = batch == batch
            if self.LAYOUT == "kv_lens":
                kv_start = batch * self.kv_batch_rows
                len_kv, is_good = checked_length(self.kv_lens_ptr, batch, self.Skv)
        return batch, head, q_start, kv_start, len_q, len_kv, is_good


@gluon.jit
def with_slots(q_slots, numbers):
    """The numbers of `Sizes` from `groups.SizeNumbers`."""
    return (
        q_slots, numbers.Hkv, numbers.heads_per_kv, numbers.B, numbers.Sq, numbers.Skv,
        numbers.left, numbers.right, numbers.kv_batch_rows,
    )  # fmt: skip


@triton.jit
def find_sequence(slot, cu_ptr, B, BLOCK: tl.constexpr, SPARE: tl.constexpr):
    """The packed sequence that owns a slot: sequence b has the slots from cu[b] // BLOCK +
    b · SPARE on. With one to spare that is enough for its tiles and at most one too many."""
    low = slot * 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_ptr + middle) // BLOCK + middle * SPARE
        low = tl.where(first <= slot, middle, low)
        high = tl.where(first <= slot, high, middle)
    return low


@gluon.jit
def visible_tiles(
    idx, length, other_length, is_good, before, after, HAS_BEFORE: gl.constexpr,
    HAS_AFTER: gl.constexpr, BLOCK: gl.constexpr, OTHER_BLOCK: gl.constexpr,
):  # fmt: skip
    """The tiles of OTHER_BLOCK rows, keys or queries, that a tile of BLOCK rows of the other kind
    sees; `idx` is its first row, and a row sees `before` rows left of the diagonal, `after` right
    of it. Returns the first tile, how many there are, -1 if the sequence is bad, and how far the
    diagonal of row `idx` is from the first row of the first tile."""
    diagonal = idx + (other_length - length)
    begin = idx * 0
    end = other_length
    if HAS_BEFORE:
        begin = gl.maximum(diagonal - before, 0)
    if HAS_AFTER:
        last = gl.minimum(idx + BLOCK, length) - 1 + (other_length - length)
        end = gl.minimum(end, last + after + 1)
    end = gl.where(idx < length, gl.maximum(end, 0), 0)
    first_tile = begin // OTHER_BLOCK
    n_tiles = gl.maximum(gl.cdiv(end, OTHER_BLOCK) - first_tile, 0)
    return first_tile, gl.where(is_good, n_tiles, -1), diagonal - first_tile * OTHER_BLOCK
