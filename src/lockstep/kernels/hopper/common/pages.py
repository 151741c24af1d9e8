"""Keys and values in pages: where they are, and how a tile of them is loaded.

A tile of BLOCK_KV keys may lie in several pages. The copy engine writes COLUMNS columns of the rows
of one page at a time, to where they belong in the tile. A page that does not exist lies outside of
the tensor map: its keys are NaN then, its values 0.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier, tma_load
from lockstep.kernels.hopper.common.tensor_maps import boxes_of


@aggregate
class PageTable:
    """Which pages sequences have. Without ROWS, keys are not in pages."""

    table_ptr: gl.tensor  # [B, ·]
    stride_tb: gl.tensor
    n_pages: gl.tensor
    page_size: gl.tensor
    ROWS: gl.constexpr  # of a page that the copy engine loads at once

    @gluon.constexpr_function
    def __init__(self, table_ptr, stride_tb, n_pages, page_size, ROWS):
        self.table_ptr = table_ptr
        self.stride_tb = stride_tb
        self.n_pages = n_pages
        self.page_size = page_size
        self.ROWS = gl.constexpr(ROWS)

    @gluon.jit
    def places_of(self, b, key, end, BLOCK_KV: gl.constexpr):
        """The page and the row there of every ROWS of BLOCK_KV keys of sequence b, from `key` on.
        The page is `n_pages` if there is none of that number, and for keys from `end` on."""
        at = key // self.page_size
        row = key - at * self.page_size
        row_ptr = self.table_ptr + b.to(gl.int64) * self.stride_tb
        places = ()
        for _part in gl.static_range(BLOCK_KV // self.ROWS):
            page = gl.load(row_ptr + at, mask=key < end, other=-1)
            is_there = (page >= 0) & (page < self.n_pages)
            page = gl.where(is_there, page, self.n_pages).to(gl.int32)
            places = places + ((page, row),)  # noqa: RUF005, Gluon does not unpack
            key += self.ROWS
            row += self.ROWS
            is_next = row == self.page_size
            at = gl.where(is_next, at + 1, at)
            row = gl.where(is_next, 0, row)
        return places


@gluon.jit
def send_pages(tiles, i, desc, places, head, first_column):
    """Producer: load the i-th tile of a ring, of columns from `first_column` on."""
    tiles.ring.wait_empty(i)
    full = tiles.ring.full(i)
    slot = tiles.ring.slot(i)
    tile = tiles.tiles_smem.index(slot)
    rest = tiles.rest_smem.index(slot)
    FIRST: gl.constexpr = tile.shape[4]
    BOTH: gl.constexpr = max(FIRST, tiles.COLUMNS)
    REST: gl.constexpr = desc.block_shape[4] if BOTH > FIRST else 0
    mbarrier.expect(full, tile.shape[3] * (FIRST + REST) * 2)
    _send_boxes(tile, full, desc, places, head, first_column)
    if BOTH > FIRST:
        _send_boxes(rest, full, desc, places, head, first_column + FIRST)


@gluon.jit
def _send_boxes(tile, full, desc, places, head, first_column):
    """Load a tile [1, 1, 1, BLOCK_KV, ·], box by box."""
    PARTS: gl.constexpr = tile.shape[3] // desc.block_shape[3]
    WIDTH: gl.constexpr = desc.block_shape[4]
    PANELS: gl.constexpr = tile.shape[4] // WIDTH
    boxes = boxes_of(tile, desc)
    for part in gl.static_range(PARTS):
        for panel in gl.static_range(PANELS):
            at = [0, places[part][0], head, places[part][1], first_column + panel * WIDTH]
            tma_load(desc, at, full, boxes.index(panel * PARTS + part))
