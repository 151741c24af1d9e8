"""Rows of a tile in which the query heads of a KV head lie side by side.

A tile of one head has as many rows as that head has queries, and a sequence with few of them leaves
the rest of it empty. The heads of a group see the same keys, so they can share tiles. Their rows
come in boxes of BOX queries of one head: first those of all heads for the first BOX queries, then
those of all heads for the next.

    row = (query // BOX · group + head) · BOX + query % BOX

So a tile may begin and end with any head, a group of any size fills it, and only the last BOX
queries of a sequence may leave rows empty. A box is as high as the pattern in which shared memory
is swizzled, and the copy engine loads and stores it by itself; HEADS of them at once, where boxes
of so many heads always begin with the same one.

Nothing of this reaches the result: the order of a row's keys does not depend on other rows.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common import sizes
from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon, mbarrier, tma_load, tma_store
from lockstep.kernels.hopper.common.tensor_maps import boxes_of, coordinates, rows_of_box

BOX = gl.constexpr(sizes.BOX)


@gluon.jit
def n_rows(len_q, group):
    """How many rows so many queries have in all heads of a group."""
    return gl.cdiv(len_q, BOX) * (BOX * group)


@gluon.jit
def place(row, group):
    """Query and head, counted in its group, of a row."""
    box = row // BOX
    of_queries = divide(box, group)
    return of_queries * BOX + row % BOX, box - of_queries * group


@gluon.jit
def queries(row, N: gl.constexpr, group):
    """The first query of N rows from `row` on, and how many there are from it to the last. Both row
    and N are those of whole boxes."""
    first = divide(row // BOX, group)
    last = divide((row + N) // BOX - 1, group)
    return first * BOX, (last + 1 - first) * BOX


@gluon.jit
def box_of(schedule, tile, row):
    """Where the box that begins with a row lies in the tensor maps of q and out, columns aside."""
    query, head = place(row, schedule.heads_per_kv)
    a, b, head, query, _column = coordinates(
        tile.batch,
        tile.q_start,
        tile.len_q,
        tile.head + head,
        query,
        0,
        schedule.LAYOUT == "varlen",
    )
    return a, b, head, query


@gluon.jit
def send_rows(schedule, tiles, i, desc, tile, row):
    """Producer: load ROWS rows of a tile of queries, from `row` on, as the i-th of a ring."""
    tiles.ring.wait_empty(i)
    full = tiles.ring.full(i)
    slot = tiles.ring.slot(i)
    first = tiles.tiles_smem.index(slot)
    rest = tiles.rest_smem.index(slot)
    FIRST: gl.constexpr = first.shape[4]
    HAS_REST: gl.constexpr = tiles.COLUMNS > FIRST
    WIDTH: gl.constexpr = desc.block_shape[4]
    STEP: gl.constexpr = rows_of_box(desc)
    PARTS: gl.constexpr = ROWS // STEP
    boxes = boxes_of(first, desc)
    mbarrier.expect(full, ROWS * (FIRST + (WIDTH if HAS_REST else 0)) * 2)
    # Unrolled, it would take more registers than this warp has.
    for part in range(PARTS):
        a, b, head, query = box_of(schedule, tile, row + part * STEP)
        for panel in gl.static_range(FIRST // WIDTH):
            box = boxes.index(panel * PARTS + part)
            tma_load(desc, [a, b, head, query, panel * WIDTH], full, box)
        if HAS_REST:
            tma_load(desc, [a, b, head, query, FIRST], full, boxes_of(rest, desc).index(part))


@gluon.jit
def store_rows(schedule, tile, row, column: gl.constexpr, o, desc):
    """Send ROWS rows of out, which are in shared memory, on their way: those from `row` on, with
    the columns from `column` on."""
    WIDTH: gl.constexpr = desc.block_shape[4]
    STEP: gl.constexpr = rows_of_box(desc)
    PARTS: gl.constexpr = ROWS // STEP
    boxes = boxes_of(o, desc)
    for part in range(PARTS):
        a, b, head, query = box_of(schedule, tile, row + part * STEP)
        for panel in gl.static_range(o.shape[4] // WIDTH):
            box = boxes.index(panel * PARTS + part)
            tma_store(desc, [a, b, head, query, column + panel * WIDTH], box)
