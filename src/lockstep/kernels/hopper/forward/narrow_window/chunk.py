"""What a program of `kernel.py` works on, and how it comes to shared memory.

A program has a *chunk* of queries. A tile has 64 rows: POSITIONS queries, of as many heads that
share their keys. Tiles are counted from the first key of the sequence, and so are steps of keys: a
row's keys lie in the same steps wherever its chunk begins.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon, mbarrier, tma_load
from lockstep.kernels.hopper.common.tensor_maps import coordinates
from lockstep.kernels.hopper.forward.narrow_window.memory import PANEL, STEP, box_of, log2, panels
from lockstep.kernels.hopper.forward.scheduling.schedule import Schedule


@aggregate
class Chunk:
    """The queries of a program, and where their keys begin."""

    schedule: Schedule
    batch: gl.tensor
    head: gl.tensor  # the first of HEADS
    kv_head: gl.tensor
    q_begin: gl.tensor  # queries from `q_begin` to `q_end`, counted in their sequence
    q_end: gl.tensor
    q_start: gl.tensor  # the sequence's first query row in the tensor
    kv_start: gl.tensor  # and its first key
    len_q: gl.tensor
    len_kv: gl.tensor
    exists: gl.tensor
    POSITIONS: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, schedule, numbers, POSITIONS):
        self.schedule = schedule
        self.batch = numbers[0]
        self.head = numbers[1]
        self.kv_head = numbers[2]
        self.q_begin = numbers[3]
        self.q_end = numbers[4]
        self.q_start = numbers[5]
        self.kv_start = numbers[6]
        self.len_q = numbers[7]
        self.len_kv = numbers[8]
        self.exists = numbers[9]
        self.POSITIONS = gl.constexpr(POSITIONS)

    @gluon.jit
    def of_program(schedule, parts, POSITIONS: gl.constexpr):
        """A schedule of groups of heads says which it is. Of its tiles, a program has one of so
        many parts, a power of two."""
        index = gl.program_id(0) // parts
        if schedule.LAYOUT == "varlen":  # noqa: SIM108, Gluon would compile both
            t = schedule.packed_tile(index)
        else:
            t = schedule.tile_at(index)
        size = schedule.BLOCK_Q // parts
        q_begin = t.q_idx + gl.program_id(0) % parts * size
        q_end = gl.minimum(q_begin + size, t.len_q)
        numbers = (
            t.batch, t.head * (ROWS // POSITIONS), t.kv_head, q_begin, q_end, t.q_start, t.kv_start,
            t.len_q, t.len_kv, t.exists & (q_begin < q_end),
        )  # fmt: skip
        return Chunk(schedule, numbers, POSITIONS)

    @gluon.jit
    def shift(self):
        """How far the key on the diagonal of a query is from it."""
        return self.len_kv - self.len_q

    @gluon.jit
    def first_tile(self):
        """The number of the first tile: they are counted from the sequence's first key."""
        return (self.q_begin + self.shift()) >> log2(self.POSITIONS)

    @gluon.jit
    def n_tiles(self):
        last = (self.q_end - 1 + self.shift()) >> log2(self.POSITIONS)
        return last - self.first_tile() + 1

    @gluon.jit
    def queries(self, n):
        """The queries of tile n: from the first to the one behind the last."""
        first = n * self.POSITIONS - self.shift()
        return gl.maximum(first, self.q_begin), gl.minimum(first + self.POSITIONS, self.q_end)

    @gluon.jit
    def first_key(self, n):
        """The first key of tile n, rounded down to whole steps; it may be negative."""
        return (n * self.POSITIONS - self.schedule.left) & -16


@gluon.jit
def send_queries(chunk, desc, n, memory, full, D: gl.constexpr, pred=True):
    """Send the queries of tile n to shared memory."""
    PANELS: gl.constexpr = panels(D)
    begin, _ = chunk.queries(n)
    mbarrier.expect(full, PANELS * desc.block_type.nbytes, pred=pred)
    for c in gl.static_range(PANELS):
        at = coordinates(
            chunk.batch, chunk.q_start, chunk.len_q, chunk.head, begin, c * PANEL,
            chunk.schedule.LAYOUT == "varlen",
        )  # fmt: skip
        box = box_of(memory, desc, c)
        tma_load(desc, at, full, box, pred=pred)


@gluon.jit
def send_keys(chunk, pages, desc, memory, full, KEYS: gl.constexpr, COLUMNS: gl.constexpr):
    """Send all keys of a chunk, or values, to shared memory."""
    PANELS: gl.constexpr = panels(COLUMNS)
    STEPS: gl.constexpr = memory.shape[0] // PANELS
    CLIPPED: gl.constexpr = chunk.schedule.LAYOUT != "dense"
    first = chunk.first_key(chunk.first_tile())
    # What the last tile does not need is not read: it is zeros, as is all that does not exist.
    end = gl.minimum(chunk.first_key(chunk.first_tile() + chunk.n_tiles() - 1) + KEYS, chunk.len_kv)
    mbarrier.expect(full, memory.shape[0] * desc.block_type.nbytes)
    for i in range(STEPS):
        key = first + i * STEP
        is_there = (key >= 0) & (key < end)
        if pages.ROWS:
            at = gl.where(is_there, key // pages.page_size, 0)
            # Packed sequences have no batch, and where their keys would begin stands their number.
            sequence = chunk.kv_start if chunk.schedule.LAYOUT == "varlen" else chunk.batch
            row_ptr = pages.table_ptr + sequence.to(gl.int64) * pages.stride_tb
            page = gl.load(row_ptr + at, mask=is_there, other=-1)
            is_page = (page >= 0) & (page < pages.n_pages)
            page = gl.where(is_page, page, pages.n_pages).to(gl.int32)
            row = gl.where(is_there, key - at * pages.page_size, 0)
            for c in gl.static_range(PANELS):
                place = [0, page, chunk.kv_head, row, c * PANEL]
                tma_load(desc, place, full, box_of(memory, desc, c * STEPS + i))
        else:
            length = gl.maximum(chunk.len_kv, 0)
            row = gl.where(is_there, key, length)
            for c in gl.static_range(PANELS):
                place = coordinates(
                    chunk.batch, chunk.kv_start, length, chunk.kv_head, row, c * PANEL, CLIPPED
                )
                tma_load(desc, place, full, box_of(memory, desc, c * STEPS + i))
