"""Which tile of queries a program works on next, and which keys that tile sees.

Programs are persistent, and neighbours should work on the same keys at the same time, which then
come from L2. Where every sequence has the same number of tiles, a program's tiles follow from its
number, in one of three orders:

- BY_HEAD, where tiles see about equally many keys: head after head.
- PAIRED, where later tiles see more (causal): tiles i and n-1-i of a head make one piece of work,
  all pieces are equally long, and go head after head. The last rounds, of which one may be without
  work for some programs, have single tiles, longest first.
- LONGEST_FIRST, where pairs are too few to fill the rounds: single tiles go round the programs,
  every other round backwards, so that a program with the longest tile of a round has the shortest
  of the next. Windows have it, too: the first tiles of a head, which see less, come last.

Where the number of programs and that of a head's pairs have a divisor in common, each program would
have the same few pairs of all heads, which may be short ones. So heads of a later round begin with
a later pair: `turn`.

Builds that SPLIT tiles have parts of them in a last round that would leave half of the programs
without work, if it is not one of pairs: a program has the rows of one consumer then. BY_HEAD, every
other round goes backwards there, so that the last tiles of heads, which may have few rows, are not
all of the same programs.

Packed sequences have lengths that only the device knows. Programs draw tickets for their tiles
(`scheduler.py`), and tickets are numbered

- LONGEST_FIRST: the longest sequence first, its last tiles first (`sequence_order.py`); or
- UNSORTED, where every tile has a program of its own and no order is better than another.

None of this reaches the result: a row's keys always come in ascending order, in blocks aligned to
multiples of BLOCK_KV in its own sequence.
"""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.division import divide
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.tensor_maps import coordinates
from lockstep.kernels.hopper.forward import grouped_rows
from lockstep.kernels.hopper.forward.scheduling import pairs, tile_parts
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import (
    BAD,
    sorted_sequence,
    unsorted_sequence,
)
from lockstep.kernels.hopper.forward.scheduling.tile import Keys, Tile
from lockstep.kernels.sequences import checked_length

LONGEST_FIRST, PAIRED, BY_HEAD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
UNSORTED = gl.constexpr(3)


@aggregate
class Schedule:
    """Sizes and masks of one launch."""

    order: gl.tensor
    n_q_tiles: gl.tensor
    heads: gl.tensor  # with tiles of their own: B · Hq if dense, Hq if sequences are packed
    Hq: gl.tensor  # those of a sequence; where a group shares its tiles, Hkv stands for Hq
    heads_per_kv: gl.tensor
    B: gl.tensor
    Sq: gl.tensor
    Skv: gl.tensor
    left: gl.tensor
    right: gl.tensor
    kv_batch_rows: gl.tensor  # from one batch to the next in a ragged map of k and v
    l2_keys: gl.tensor  # of one head whose keys and values may stay in L2
    turn: gl.tensor  # how many pairs later a head begins than one a round before
    parts: gl.tensor  # that have slots of their own among those of a head, or 0: key_parts.py
    cu_q_ptr: gl.tensor
    cu_kv_ptr: gl.tensor
    kv_lens_ptr: gl.tensor
    sequence_order_ptr: gl.tensor
    LAYOUT: gl.constexpr  # "dense", "kv_lens" or "varlen"
    HAS_LEFT: gl.constexpr
    HAS_RIGHT: gl.constexpr
    BLOCK_Q: gl.constexpr
    BLOCK_KV: gl.constexpr
    SPLIT: gl.constexpr  # tiles may have rows of one consumer only
    HEADS: gl.constexpr  # of a group that come together, 0 if a tile has one: grouped_rows.py
    PARTS: gl.constexpr  # keys of a tile may have several: key_parts.py

    @gluon.constexpr_function
    def __init__(
        self, sizes, pointers, LAYOUT, HAS_LEFT, HAS_RIGHT, BLOCK_Q, BLOCK_KV, SPLIT=False, HEADS=0,
        PARTS=False,
    ):  # fmt: skip
        self.order = sizes[0]
        self.n_q_tiles = sizes[1]
        self.heads = sizes[2]
        self.Hq = sizes[3]
        self.heads_per_kv = sizes[4]
        self.B = sizes[5]
        self.Sq = sizes[6]
        self.Skv = sizes[7]
        self.left = sizes[8]
        self.right = sizes[9]
        self.kv_batch_rows = sizes[10]
        self.l2_keys = sizes[11]
        # Kernels with an order of their own have no turn, and anything may stand for it.
        self.turn = sizes[12] if len(sizes) > 12 else sizes[0]
        self.parts = sizes[13] if len(sizes) > 13 else sizes[0]
        self.cu_q_ptr = pointers[0]
        self.cu_kv_ptr = pointers[1]
        self.kv_lens_ptr = pointers[2]
        self.sequence_order_ptr = pointers[3]
        self.LAYOUT = gl.constexpr(LAYOUT)
        self.HAS_LEFT = gl.constexpr(HAS_LEFT)
        self.HAS_RIGHT = gl.constexpr(HAS_RIGHT)
        self.BLOCK_Q = gl.constexpr(BLOCK_Q)
        self.BLOCK_KV = gl.constexpr(BLOCK_KV)
        self.SPLIT = gl.constexpr(SPLIT)
        self.HEADS = gl.constexpr(HEADS)
        self.PARTS = gl.constexpr(PARTS)

    @gluon.jit
    def next(self, step):
        """The first step from `step` on that has a tile, and the tile; without one, the tile does
        not exist."""
        n_steps = gl.cdiv(self.n_q_tiles * self.heads, gl.num_programs(0)) + 1
        if self.order == PAIRED:
            # A pair may be a single tile, and has two steps.
            n_steps += pairs.pair_rounds(self)
        tile = self.tile(step)
        while (tile.exists == 0) & (step + 1 < n_steps):
            step += 1
            tile = self.tile(step)
        return step, tile

    @gluon.jit
    def tile(self, step):
        """The tile of a step; there may be none."""
        pid = gl.program_id(0)
        programs = gl.num_programs(0)
        first_row = pid * 0
        rows = first_row + self.BLOCK_Q
        if self.order == PAIRED:
            rounds = pairs.pair_rounds(self)
            if step < 2 * rounds:
                index = step // 2 * programs + pid
                head, slot, exists = pairs.paired(self, rounds * programs, index, step % 2)
            else:
                single = step - 2 * rounds
                index = single * programs + gl.where(single % 2 == 0, pid, programs - 1 - pid)
                head, slot, exists = pairs.left_by_pairs(self, rounds * programs, index)
        else:
            turns = (step % 2 == 1) & (self.order != BY_HEAD)
            index = step * programs + gl.where(turns, programs - 1 - pid, pid)
            if self.SPLIT:
                index, first_row, rows = self._part(step)
            if self.order == LONGEST_FIRST:
                slot = self.n_q_tiles - 1 - index // self.heads
                head = index % self.heads
            else:
                head = index // self.n_q_tiles
                slot = index % self.n_q_tiles
            exists = slot >= 0
        return self._dense_tile(head, slot, exists, first_row, rows)

    @gluon.jit
    def _part(self, step):
        """The tile of a step, its first row that is this program's, and how many are: all of them,
        or in a last round with few tiles those of one consumer."""
        PARTS: gl.constexpr = self.BLOCK_Q // ROWS
        pid = gl.program_id(0)
        programs = gl.num_programs(0)
        place = gl.where(step % 2 == 0, pid, programs - 1 - pid)
        is_split = (self.n_q_tiles * self.heads - step * programs) * PARTS <= programs
        index = step * programs + gl.where(is_split, place // PARTS, place)
        first_row = gl.where(is_split, place % PARTS * ROWS, 0)
        return index, first_row, gl.where(is_split, ROWS, self.BLOCK_Q)

    @gluon.jit
    def tile_at(self, index):
        """The tile of that index, head after head; there may be none."""
        slot = index % self.n_q_tiles
        return self._dense_tile(index // self.n_q_tiles, slot, index >= 0, index * 0, self.Sq)

    @gluon.jit
    def _dense_tile(self, head, slot, exists, first_row, rows):
        """So many `rows` of a tile of a head, counted in all sequences together."""
        part = slot * 0
        if self.PARTS:
            n_slots = gl.maximum(self.parts, 1)
            part = slot % n_slots
            slot = slot // n_slots
        q_idx = slot * self.BLOCK_Q
        exists = exists & (head < self.heads)
        len_q = self.Sq
        if self.SPLIT:
            q_idx = q_idx + first_row
            exists = exists & (q_idx < self.n_rows(self.Sq))
            len_q = gl.minimum(self.n_rows(self.Sq), q_idx + rows)
        of_head = head * self.n_q_tiles
        batch = head // self.Hq
        head, kv_head = self._heads_of(head % self.Hq)
        len_kv = self.Skv
        kv_start = batch * 0
        if self.LAYOUT == "kv_lens":
            # Of a tile that does not exist, the length of any sequence.
            b = gl.where(exists, batch, 0)
            len_kv, is_good = checked_length(self.kv_lens_ptr, b, self.Skv)
            len_kv = gl.where(is_good, len_kv, BAD)
            kv_start = batch * self.kv_batch_rows
        keys = Keys.every(batch)
        if self.PARTS:
            n_tiles = gl.cdiv(self.n_rows(self.Sq), self.BLOCK_Q)
            n_parts = tile_parts.parts_of_tile(self, n_tiles, len_q, len_kv)
            exists = exists & (part < n_parts)
            keys = tile_parts.keys_of(part, n_parts, of_head + slot * self.parts, self.parts > 0)
        return Tile(
            exists,
            head,
            kv_head,
            batch,
            q_idx,
            batch * 0,
            kv_start,
            len_q,
            len_kv,
            keys,
        )

    @gluon.jit
    def _heads_of(self, number):
        """The query head, or the first one, and the KV head of what has tiles of its own."""
        if self.HEADS:
            return number * self.heads_per_kv, number
        else:  # noqa: RET505, Gluon would go on and return both
            return number, number // self.heads_per_kv

    @gluon.jit
    def n_rows(self, len_q):
        """How many rows so many queries have, of all heads that share a tile."""
        if self.HEADS:
            return grouped_rows.n_rows(len_q, self.heads_per_kv)
        else:  # noqa: RET505
            return len_q

    @gluon.jit
    def place(self, tile, row):
        """Query and head of each row [N]."""
        if self.HEADS:
            query, head = grouped_rows.place(row, self.heads_per_kv)
            return query, tile.head + head
        else:  # noqa: RET505
            return row, tile.head

    @gluon.jit
    def exist(self, tile, row):
        """Whether there are rows [N] of that number, and they are this program's."""
        exist = row < tile.len_q
        if self.HEADS:
            query, _head = grouped_rows.place(row, self.heads_per_kv)
            is_query = query < self.n_queries(tile)
            exist = is_query & exist if self.SPLIT else is_query
        return exist

    @gluon.jit
    def queries(self, row, N: gl.constexpr):
        """The first query of N rows from `row` on, and how many there are from it to the last."""
        if self.HEADS:
            return grouped_rows.queries(row, N, self.heads_per_kv)
        else:  # noqa: RET505
            return row, N

    @gluon.jit
    def packed_tile(self, ticket):
        """The tile of a ticket; there may be none."""
        slot = ticket // self.Hq
        if self.order == LONGEST_FIRST:
            first, q_start, len_q, kv_start, len_kv = sorted_sequence(self, slot)
        else:
            first, q_start, len_q, kv_start, len_kv = unsorted_sequence(self, slot)
        n_tiles = gl.cdiv(self.n_rows(len_q), self.BLOCK_Q)
        keys = Keys.every(ticket)
        n_units = n_tiles
        if self.PARTS:
            n_parts = tile_parts.parts_of_tile(self, n_tiles, len_q, len_kv)
            has_slot = tile_parts.has_slot_each(self)
            n_each = gl.where(has_slot, n_parts, 1)
            n_units = n_tiles * n_each
        # Of the tickets of a sequence, as many heads come first as have their keys in L2, the last
        # tiles of all of them before the last but one.
        of_sequence = ticket - first * self.Hq
        group = gl.minimum(gl.maximum(self.l2_keys // gl.maximum(len_kv, 1), 1), self.Hq)
        first_head = of_sequence // gl.maximum(group * n_units, 1) * group
        group = gl.maximum(gl.minimum(group, self.Hq - first_head), 1)
        of_group = of_sequence - first_head * n_units
        number = first_head + of_group % group
        head, kv_head = self._heads_of(number)
        q_tile = n_units - 1 - of_group // group
        exists = of_sequence < n_units * self.Hq
        if self.PARTS:
            unit = q_tile
            q_tile = divide(unit, n_each)
            part = unit - q_tile * n_each
            slot = (first * self.Hq + number * n_units) + q_tile * n_each
            keys = tile_parts.keys_of(part, n_parts, slot, has_slot)
        else:
            exists = (ticket < self.n_q_tiles * self.Hq) & exists
        return Tile(
            exists,
            head,
            kv_head,
            head * 0,
            q_tile * self.BLOCK_Q,
            q_start,
            kv_start,
            len_q,
            len_kv,
            keys,
        )

    @gluon.jit
    def n_queries(self, tile):
        """The queries of a tile's sequence."""
        if self.SPLIT:
            return self.Sq
        else:  # noqa: RET505, Gluon would go on and return both
            return tile.len_q

    @gluon.jit
    def blocks(self, tile, q_idx, ROWS: gl.constexpr):
        """The blocks of keys `begin` to `end`, at least one, that ROWS rows from `q_idx` on see.
        Where tiles are split, rows that are not the program's have one."""
        query, n = self.queries(q_idx, ROWS)
        first = query + tile.len_kv - self.n_queries(tile)  # the first row's place on the diagonal
        begin = first * 0
        end = tile.len_kv
        if self.SPLIT:
            end = gl.where(q_idx < tile.len_q, end, 0)
        if self.HAS_RIGHT:
            end = gl.minimum(end, first + n + self.right)
        if self.HAS_LEFT:
            # Rows past the last one of a sequence may see no key at all; nor may there be any.
            last_key = gl.maximum(tile.len_kv - 1, 0)
            begin = gl.minimum(gl.maximum(first - self.left, 0), last_key) // self.BLOCK_KV
        end = gl.cdiv(gl.maximum(end, 0), self.BLOCK_KV)
        if self.PARTS:
            begin = gl.maximum(begin, tile.keys.first_block)
            end = gl.minimum(end, tile.keys.end_block)
        return begin, gl.maximum(end, begin + 1)

    @gluon.jit
    def inner_blocks(self, tile, q_idx, ROWS: gl.constexpr):
        """Blocks from `begin` to `end` are seen whole by every one of ROWS rows from `q_idx` on;
        `end` is BAD if the sequence is."""
        query, n = self.queries(q_idx, ROWS)
        first = query + tile.len_kv - self.n_queries(tile)
        begin = first * 0
        end = tile.len_kv
        if self.HAS_RIGHT:
            end = gl.minimum(end, first + self.right + 1)
        if self.HAS_LEFT:
            begin = gl.cdiv(gl.maximum(first + n - 1 - self.left, 0), self.BLOCK_KV)
        if self.PARTS:
            begin = gl.maximum(begin, tile.keys.first_block)
        end = gl.maximum(end, 0) // self.BLOCK_KV
        return begin, gl.where(tile.len_kv == BAD, BAD, end)

    @gluon.jit
    def row_bounds(self, tile, q_idx):
        """The first key that each row q_idx [N] sees, and the first behind it that it does
        not see."""
        query, _head = self.place(tile, q_idx)
        position = query + (tile.len_kv - self.n_queries(tile))
        begin = position * 0
        end = begin + tile.len_kv
        if self.HAS_RIGHT:
            end = gl.minimum(end, position + self.right + 1)
        if self.HAS_LEFT:
            begin = position - self.left
        return begin, end

    @gluon.jit
    def q_coordinates(self, tile, q_idx, column=0):
        """Where row `q_idx` of a tile's sequence lies in the tensor maps of q and out."""
        return coordinates(
            tile.batch, tile.q_start, tile.len_q, tile.head, q_idx, column, self.LAYOUT == "varlen"
        )

    @gluon.jit
    def kv_coordinates(self, tile, block, column=0):
        """Where a block of keys lies in the tensor maps of k and v."""
        row = block * self.BLOCK_KV
        return coordinates(
            tile.batch,
            tile.kv_start,
            tile.len_kv,
            tile.kv_head,
            row,
            column,
            self.LAYOUT != "dense",
        )
