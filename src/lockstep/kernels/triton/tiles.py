"""One tile of keys in the kernels: locate, load, score, mask and fold it.

Rows. The query heads that share a KV head are packed into the rows of a tile: row `r` of a KV head
is query `r // GROUP` under head `r % GROUP`.

Spans. The keys of a sequence are cut into spans of equal size from the first on. Within a
span the online softmax carries (m, l, acc); a finished span is a part with the same three, and
parts are folded in ascending order by the formula of `lockstep.merge`. Which program computes a
span, and whether the one that computes it also folds it, changes nothing about the numbers. A
product that is later added to something is written as an `fma`: left to itself, a compiler joins
product and sum where it sees both, and cannot where one was stored in between.

Scores are raw products, or in natural units where a softcap, a bias, slopes or a scale that is not
positive come in; times `unit` they are in log2 units. The maximum is subtracted first: the
difference of large scores is exact, and so are their weights, whatever their size.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lockstep import numerics
from lockstep.kernels.triton.groups import TileRanges
from lockstep.kernels.triton.products import product

LOG2E: tl.constexpr = tl.constexpr(numerics.LOG2E)


@triton.jit
def seen_by_any(first, last, kv_len, window):
    """Keys [lo, hi) outside which no row at the positions `first` to `last` sees anything."""
    lo, hi = 0, kv_len
    if window.left is not None:
        lo = tl.maximum(first - window.left, 0)
    if window.right is not None:
        hi = tl.minimum(last + window.right + 1, kv_len)
    return lo, hi


@triton.jit
def seen_by_all(first, last, kv_len, window):
    """Keys [lo, hi) that every row at the positions `first` to `last` sees."""
    lo, hi = 0, kv_len
    if window.left is not None:
        lo = tl.maximum(last - window.left, 0)
    if window.right is not None:
        hi = tl.minimum(first + window.right + 1, kv_len)
    return lo, hi


@triton.jit
def keys_seen(
    tile, n_rows, shift, kv_len, kv_stop, window,
    GROUP: tl.constexpr, SECRET_LENGTHS: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """The keys [lo, hi) that some row of a tile sees, and those that all of them see."""
    first_position = tile * BLOCK_Q // GROUP + shift
    last_position = (tl.minimum(tile * BLOCK_Q + BLOCK_Q, n_rows) - 1) // GROUP + shift
    lo, hi = seen_by_any(first_position, last_position, kv_len, window)
    all_lo, all_hi = seen_by_all(first_position, last_position, kv_len, window)
    if SECRET_LENGTHS:
        lo, hi, all_lo, all_hi = 0, kv_stop, 0, 0
    return lo, hi, all_lo, all_hi


@triton.jit
def tile_ranges(lo, hi, all_lo, all_hi, BLOCK: tl.constexpr, ALL_MASKED: tl.constexpr = False):
    """Which tiles of BLOCK need a mask: something is seen in [lo, hi), everything in [all_lo,
    all_hi)."""
    start = lo // BLOCK
    end = tl.maximum(tl.cdiv(hi, BLOCK), start)
    whole, masked = start, start
    if not ALL_MASKED:
        whole = tl.minimum(tl.maximum(tl.cdiv(all_lo, BLOCK), start), end)
        masked = tl.minimum(tl.maximum(all_hi // BLOCK, whole), end)
    return TileRanges(start, whole, masked, end)


@triton.jit
def tiles_seen(first, last, kv_len, window, BLOCK: tl.constexpr, ALL_MASKED: tl.constexpr):
    """The tiles of keys that some row at the positions `first` to `last` sees."""
    lo, hi = seen_by_any(first, last, kv_len, window)
    all_lo, all_hi = seen_by_all(first, last, kv_len, window)
    return tile_ranges(lo, hi, all_lo, all_hi, BLOCK, ALL_MASKED)


@triton.jit
def is_seen(position, kv_idx, kv_len, window):
    """Which rows see which keys, bias aside: position [BLOCK_Q, 1], kv_idx [1, BLOCK_KV]."""
    seen = (kv_idx < kv_len) & (position == position)  # [BLOCK_Q, BLOCK_KV]
    if window.left is not None:
        seen &= kv_idx >= position - window.left
    if window.right is not None:
        seen &= kv_idx <= position + window.right
    return seen


@triton.jit
def page_of(kv_idx, kv_len, pages, PAGE_SIZE: tl.constexpr):
    """The page of a key, or of several, 0 beyond the sequence; and whether its number is wrong: the
    page returned is then any that exists."""
    page = tl.load(pages.table_ptr + kv_idx // PAGE_SIZE, mask=kv_idx < kv_len, other=0)
    is_wrong = (page < 0) | (page >= pages.n_pages)
    # Half of a number does, and takes one instruction: this is done for every row of a tile.
    there = tl.minimum(page.to(tl.uint32), tl.cast(pages.n_pages - 1, tl.uint32))
    return there.to(tl.int64), is_wrong


@triton.jit
def pages_of_tile(PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """The numbers 0 … n − 1 of the n pages that a tile of keys may touch."""
    N: tl.constexpr = triton.next_power_of_2((BLOCK_KV - 1) // PAGE_SIZE + 2)
    return tl.arange(0, N)


@triton.jit
def wrong_pages(first, kv_len, pages, PAGE_SIZE: tl.constexpr, BLOCK_KV: tl.constexpr):
    """Which pages of the tile of keys from `first` on have a wrong number: [n] for n pages."""
    first_of_page = (first // PAGE_SIZE + pages_of_tile(PAGE_SIZE, BLOCK_KV)) * PAGE_SIZE
    end = tl.minimum(first + BLOCK_KV, kv_len)
    _page, is_wrong = page_of(first_of_page, end, pages, PAGE_SIZE)
    return is_wrong


@triton.jit
def load_by_pointer(
    head,
    pages,
    first,
    kv_len,
    D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    page=None,
    IN_PAGE: tl.constexpr = False,
):
    """Keys or values `first` to `first + BLOCK_KV` of one head of a sequence: [BLOCK_KV, BLOCK_D].

    With a PAGE_SIZE they come out of pages. With IN_PAGE the whole tile lies in one page, `page` if
    the caller knows it. MASKED tiles are not read beyond `kv_len`: what is there may not be memory,
    and reads as 0.
    """
    offset = tl.arange(0, BLOCK_KV)
    d = tl.arange(0, BLOCK_D)
    inside = offset < kv_len - first  # [BLOCK_KV]
    if PAGE_SIZE == 0:
        rows = head.ptr + tl.cast(first, tl.int64) * head.stride_s + offset[:, None] * head.stride_s
    elif IN_PAGE:
        if page is None:
            page, _is_wrong = page_of(first, kv_len, pages, PAGE_SIZE)
        slot = first % PAGE_SIZE
        rows = head.ptr + page * head.stride_page + tl.cast(slot, tl.int64) * head.stride_s
        rows += offset[:, None] * head.stride_s
    else:
        kv_idx = first + offset
        page, _are_wrong = page_of(kv_idx, kv_len, pages, PAGE_SIZE)
        slot = (kv_idx % PAGE_SIZE).to(tl.int64)
        rows = head.ptr + (page * head.stride_page + slot * head.stride_s)[:, None]
    tile_ptr = rows + d[None, :]  # [BLOCK_KV, BLOCK_D]
    if MASKED and D < BLOCK_D:
        return tl.load(tile_ptr, mask=inside[:, None] & (d < D)[None, :], other=0.0)
    if MASKED:
        return tl.load(tile_ptr, mask=inside[:, None], other=0.0)
    if D < BLOCK_D:
        return tl.load(tile_ptr, mask=(d < D)[None, :], other=0.0)
    return tl.load(tile_ptr)


@triton.jit
def load_tile(
    head,
    pages,
    first,
    kv_len,
    D: tl.constexpr,
    BLOCK_KV: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
    page=None,
    IN_PAGE: tl.constexpr = False,
):
    """The tile that `load_by_pointer` loads, by way of the head's descriptor if there is one. A
    descriptor ends with the sequence, or with the last of all pages."""
    if head.desc is None:
        tile = load_by_pointer(
            head, pages, first, kv_len, D, BLOCK_KV, BLOCK_D, PAGE_SIZE, MASKED, page, IN_PAGE
        )
    else:
        row = first
        if PAGE_SIZE != 0:
            row = page.to(tl.int32) * PAGE_SIZE + first % PAGE_SIZE
        tile = head.desc.load([row, 0])
    return tile


@triton.jit
def load_bias(bias, kv_idx, is_row, kv_len):
    """Rows [BLOCK_Q] and keys [1, BLOCK_KV] to [BLOCK_Q, BLOCK_KV] fp32."""
    inside = is_row[:, None] & (kv_idx < kv_len)
    at = bias.ptr[:, None] + kv_idx.to(tl.int64) * bias.stride_k
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def tanh(x):
    """tanh x within 2 units in the last place: a polynomial near 0, where 1 - 2 / (e^2x + 1)
    cancels."""
    u = x * x
    p = tl.fma(u, -5.691985662956167e-3, 2.062629182300504e-2)
    p = tl.fma(u, p, -5.3735318849346424e-2)
    p = tl.fma(u, p, 1.3331381354358765e-1)
    p = tl.fma(u, p, -3.3333279208370503e-1)
    near = tl.fma(x * u, p, x)
    far = 1.0 - 2.0 / (tl.exp2(tl.abs(x) * (2.0 * LOG2E)) + 1.0)
    return tl.where(u < 0.390625, near, tl.where(x < 0.0, -far, far))


@triton.jit
def scores(
    q,  # [BLOCK_Q, BLOCK_D]
    k,  # [BLOCK_KV, BLOCK_D]
    bias,  # [BLOCK_Q, BLOCK_KV] fp32, or None
    alibi,  # [BLOCK_Q, BLOCK_KV] fp32, or None
    scoring,
    PRECISION: tl.constexpr,
):
    """[BLOCK_Q, BLOCK_KV] fp32: products, or scores in natural units if `scoring` has a scale."""
    s = product(q, k, PRECISION)
    return finish_scores(s, bias, alibi, scoring)[0]


@triton.jit
def alibi_of(slopes, position, kv_idx):
    """The term that ALiBi adds to scores: slopes and positions [M, 1], keys [1, N], or both
    transposed."""
    distance = tl.abs(position - kv_idx).to(tl.float32)
    return -slopes * distance


@triton.jit
def finish_scores(s, bias, alibi, scoring):
    """Scores from products, and the slope of the softcap, 1 without one."""
    slope = 1.0
    if scoring.cap_scale is not None:
        s = tanh(s * scoring.cap_scale)
        slope = tl.fma(-s, s, 1.0)
    if bias is not None:
        s = tl.fma(s, scoring.score_scale, bias)
        # A bias of -inf hides a key whatever its score is, NaN included.
        s = tl.where(bias == float("-inf"), float("-inf"), s)
    elif alibi is not None:
        s = tl.fma(s, scoring.score_scale, alibi)
    elif scoring.score_scale is not None:
        s = tl.fma(s, scoring.score_scale, 0.0)
    return s, slope


@triton.jit
def online_softmax(s, unit, m, l):
    """One step: p [BLOCK_Q, BLOCK_KV], what to multiply acc by [BLOCK_Q], and the new m and l."""
    m_new = tl.maximum(m, tl.max(s, 1))
    # exp2(-inf - -inf) would be NaN: relative to 0, a row without keys has weights of 0.
    origin = tl.where(m_new == float("-inf"), 0.0, m_new)
    alpha = tl.exp2((m - origin) * unit)
    p = tl.exp2((s - origin[:, None]) * unit)  # [BLOCK_Q, BLOCK_KV]
    return p, alpha, m_new, tl.fma(l, alpha, tl.sum(p, 1))


@triton.jit
def is_nonfinite(x):
    """Where x is NaN or infinite: there 0 · x is not 0, and leaks into rows that do not see it."""
    return (x.to(tl.float32) * 0.0) != 0.0


@triton.jit
def any_nonfinite(x):
    return tl.max(tl.max(is_nonfinite(x).to(tl.int32), 1), 0) != 0
