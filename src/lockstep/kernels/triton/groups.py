"""Groups of arguments of the Triton kernels and their functions.

Groups of a kernel's own parameters come first; `kernels.spread` takes them apart for Triton.

A field is None where a call has no such thing; which fields are None is known when a kernel is
compiled, so `if window.left is not None` costs nothing. A group that may itself be None has no such
field: Triton 3.6 cannot compare it with None then. Compile-time constants are no fields: Triton
makes a tensor of them when a group gets a name.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Strides(NamedTuple):
    """Strides of a tensor of rows."""

    b: Any  # from one sequence, or page, to the next
    h: Any  # from one head to the next
    s: Any  # from one row to the next


class BiasStrides(NamedTuple):
    """Strides of the bias, 0 along dims of which it has one element for all."""

    b: Any
    h: Any
    q: Any
    k: Any


class GradientInputs(NamedTuple):
    """Pointers to what gradients are computed from, None where a call has no such tensor."""

    q_ptr: Any
    k_ptr: Any
    v_ptr: Any
    bias_ptr: Any
    kv_lens_ptr: Any
    kv_starts_ptr: Any
    alibi_slopes_ptr: Any
    cu_seqlens_q_ptr: Any
    cu_seqlens_k_ptr: Any
    dout_ptr: Any
    rows_ptr: Any  # `gradient_rows`


class GradientSizes(NamedTuple):
    """Sizes of a call, and the programs of a head."""

    B: Any
    Hq: Any
    Sq: Any
    Skv: Any
    n_slots: Any


class Window(NamedTuple):
    """A row at position p sees the keys from p - left to p + right; None is no limit."""

    left: Any
    right: Any


class Scoring(NamedTuple):
    """The numbers that make scores of products: `tiles.finish_scores`."""

    cap_scale: Any  # scale / softcap, None without a softcap
    score_scale: Any  # softcap, or scale without one; None where the scores are the products
    unit: Any  # turns scores into log2 units


class State(NamedTuple):
    """The softmax of some keys of each row, not yet divided by l: `kernels.parts`."""

    m: Any  # [BLOCK_Q] fp32
    l: Any  # [BLOCK_Q] fp32
    acc: Any  # [BLOCK_Q, BLOCK_DV] fp32


class Head(NamedTuple):
    """The rows of one head of a tensor."""

    ptr: Any  # the first row; that of page 0 if the rows are in pages
    stride_s: Any  # from one row to the next
    stride_page: Any = None  # from one page to the next
    desc: Any = None  # a TMA descriptor of the rows, if they are read by way of one


class HeadGroup(NamedTuple):
    """The rows of the query heads that share a KV head."""

    ptr: Any  # the first row of the first head
    stride_h: Any  # from one head to the next
    stride_s: Any  # from one row to the next


class Pages(NamedTuple):
    """Which pages hold the keys of a sequence."""

    table_ptr: Any
    n_pages: Any  # in all, of all sequences
    first_key: Any  # the place of the sequence's first key in its pages, None for 0


class Rows(NamedTuple):
    """The rows of a tile of queries."""

    position: Any  # [BLOCK_Q], of the key on the diagonal
    is_row: Any  # [BLOCK_Q] bool, whether there is such a row


class Place(NamedTuple):
    """Where the rows of a tile of queries are, and the keys of their sequence."""

    batch: Any  # int64
    q_idx: Any  # [BLOCK_Q]
    q_head: Any  # [BLOCK_Q]
    out_row: Any  # [BLOCK_Q], counted through
    out_ptrs: Any  # [BLOCK_Q], to these rows of out
    kv_start: Any
    kv_len: Any
    kv_stop: Any  # where the loop over keys ends
    is_good: Any  # whether the numbers of the sequence are


class RowPointers(NamedTuple):
    """Where something of each row is stored, span by span."""

    parts: Any  # [BLOCK_Q], acc
    stats: Any  # [BLOCK_Q], m and l


class BiasRows(NamedTuple):
    """The bias of a tile of rows."""

    ptr: Any  # [BLOCK_Q], the bias of key 0
    stride_k: Any


class BiasHead(NamedTuple):
    """The bias of one head, or of the heads that share a KV head."""

    ptr: Any
    stride_h: Any  # from one head to the next
    stride_q: Any
    stride_k: Any


class RowStatistics(NamedTuple):
    """Numbers of each row that the backward needs: `gradient_rows`."""

    m: Any
    norm: Any
    delta: Any


class TileRanges(NamedTuple):
    """Tiles [start, whole) and [masked, end) need a mask, tiles [whole, masked) do not."""

    start: Any
    whole: Any
    masked: Any
    end: Any
