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
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.tensor_maps import coordinates
from lockstep.kernels.hopper.forward import grouped_rows
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import (
    BAD,
    sorted_sequence,
    unsorted_sequence,
)
from lockstep.kernels.hopper.forward.scheduling.tile import Tile
from lockstep.kernels.sequences import checked_length

LONGEST_FIRST, PAIRED, BY_HEAD = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
UNSORTED = gl.constexpr(3)
# Whole rounds of pairs whose tiles go singly, with those of the round that is not whole.
SINGLE_ROUNDS = gl.constexpr(1)


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

    @gluon.constexpr_function
    def __init__(
        self, sizes, pointers, LAYOUT, HAS_LEFT, HAS_RIGHT, BLOCK_Q, BLOCK_KV, SPLIT=False, HEADS=0
    ):
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

    @gluon.jit
    def next(self, step):
        """The first step from `step` on that has a tile, and the tile; without one, the tile does
        not exist."""
        n_steps = gl.cdiv(self.n_q_tiles * self.heads, gl.num_programs(0)) + 1
        if self.order == PAIRED:
            # A pair may be a single tile, and has two steps.
            n_steps += self.pair_rounds()
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
            rounds = self.pair_rounds()
            if step < 2 * rounds:
                index = step // 2 * programs + pid
                head, slot, exists = self._paired(rounds * programs, index, step % 2)
            else:
                single = step - 2 * rounds
                index = single * programs + gl.where(single % 2 == 0, pid, programs - 1 - pid)
                head, slot, exists = self._left_by_pairs(rounds * programs, index)
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
        q_idx = slot * self.BLOCK_Q
        exists = exists & (head < self.heads)
        len_q = self.Sq
        if self.SPLIT:
            q_idx = q_idx + first_row
            exists = exists & (q_idx < self.n_rows(self.Sq))
            len_q = gl.minimum(self.n_rows(self.Sq), q_idx + rows)
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
    def pair_rounds(self):
        """How many rounds of pairs there are before single tiles."""
        n_pairs = (self.n_q_tiles + 1) // 2
        return gl.maximum(n_pairs * self.heads // gl.num_programs(0) - SINGLE_ROUNDS, 0)

    @gluon.jit
    def _paired(self, n_paired, index, second):
        """Head and slot of the first or the `second` tile of a pair, of n_paired in all, and
        whether there is one."""
        n_pairs = (self.n_q_tiles + 1) // 2
        head = index // n_pairs
        turns = head * n_pairs // gl.num_programs(0) * self.turn
        # The tiles that are left of the last head are those in its middle.
        is_whole = head < n_paired // n_pairs
        pair = (index + gl.where(is_whole, turns, 0)) % n_pairs
        slot = gl.where(second == 0, self.n_q_tiles - 1 - pair, pair)
        # The tile in the middle is its own pair.
        return head, slot, (second == 0) | (2 * pair != self.n_q_tiles - 1)

    @gluon.jit
    def _left_by_pairs(self, n_paired, index):
        """The same of the tiles that n_paired pairs leave, the longest first: some in the middle of
        one head, and all of those after it."""
        n_pairs = (self.n_q_tiles + 1) // 2
        cut_head = n_paired // n_pairs
        cut = n_paired % n_pairs  # so many tiles of that head are gone at either end
        n_whole = self.heads - cut_head - 1
        # Tiles as long as those that are gone, and tiles that are in the middle of their heads.
        n_long = cut * n_whole
        n_middle = (self.n_q_tiles - 2 * cut) * (n_whole + 1)
        is_long = index < n_long
        is_middle = (is_long == 0) & (index < n_long + n_middle)
        at = index - gl.where(is_long, 0, gl.where(is_middle, n_long, n_long + n_middle))
        before = gl.where(is_long, 0, gl.where(is_middle, cut, self.n_q_tiles - cut))
        n_heads = gl.where(is_middle, n_whole + 1, gl.maximum(n_whole, 1))
        first_head = gl.where(is_middle, cut_head, cut_head + 1)
        slot = self.n_q_tiles - 1 - before - at // n_heads
        return first_head + at % n_heads, slot, index < 2 * n_long + n_middle

    @gluon.jit
    def packed_tile(self, ticket):
        """The tile of a ticket; there may be none."""
        slot = ticket // self.Hq
        if self.order == LONGEST_FIRST:
            first, q_start, len_q, kv_start, len_kv = sorted_sequence(self, slot)
        else:
            first, q_start, len_q, kv_start, len_kv = unsorted_sequence(self, slot)
        n_tiles = gl.cdiv(self.n_rows(len_q), self.BLOCK_Q)
        # Of the tickets of a sequence, as many heads come first as have their keys in L2, the last
        # tiles of all of them before the last but one.
        of_sequence = ticket - first * self.Hq
        group = gl.minimum(gl.maximum(self.l2_keys // gl.maximum(len_kv, 1), 1), self.Hq)
        first_head = of_sequence // gl.maximum(group * n_tiles, 1) * group
        group = gl.maximum(gl.minimum(group, self.Hq - first_head), 1)
        of_group = of_sequence - first_head * n_tiles
        head, kv_head = self._heads_of(first_head + of_group % group)
        q_tile = n_tiles - 1 - of_group // group
        return Tile(
            (ticket < self.n_q_tiles * self.Hq) & (of_sequence < n_tiles * self.Hq),
            head,
            kv_head,
            head * 0,
            q_tile * self.BLOCK_Q,
            q_start,
            kv_start,
            len_q,
            len_kv,
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
        return begin, gl.maximum(gl.cdiv(gl.maximum(end, 0), self.BLOCK_KV), begin + 1)

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
