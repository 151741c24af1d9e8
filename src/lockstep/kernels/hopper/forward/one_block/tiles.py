"""The tiles of a program: tiles of 64 queries one after the other, head by head,
so that those which share keys and values are neighbours."""

from __future__ import annotations

from lockstep.kernels.hopper.common.accumulator import ROWS
from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon
from lockstep.kernels.hopper.common.tensor_maps import coordinates
from lockstep.kernels.hopper.forward.scheduling.packed_sequences import ORDER_HEAD


@aggregate
class HeadTile:
    """A tile of queries of one head."""

    batch: gl.tensor
    kv_head: gl.tensor
    member: gl.tensor  # which of the heads that share these keys
    q_tile: gl.tensor

    @gluon.constexpr_function
    def __init__(self, batch, kv_head, member, q_tile):
        self.batch = batch
        self.kv_head = kv_head
        self.member = member
        self.q_tile = q_tile

    @gluon.jit
    def is_first_of_keys(self):
        """Whether the tile before has other keys."""
        return (self.member == 0) & (self.q_tile == 0)


@aggregate
class HeadTiles:
    """`count` tiles of a program, from `first` on."""

    first: HeadTile
    count: gl.tensor
    step: gl.tensor  # from keys to the next ones, in KV heads and sequences
    step_b: gl.tensor
    n_q_tiles: gl.tensor  # of a head
    heads_per_kv: gl.tensor
    Hkv: gl.tensor
    q_start: gl.tensor  # the sequence's first query in the tensor
    kv_start: gl.tensor  # and its first key
    Sq: gl.tensor
    Skv: gl.tensor
    PACKED: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, first, count, step, n_q_tiles, heads, q_start, kv_start, Sq, Skv, PACKED):
        self.first = first
        self.count = count
        self.step = step[0]
        self.step_b = step[1]
        self.n_q_tiles = n_q_tiles
        self.heads_per_kv = heads[0]
        self.Hkv = heads[1]
        self.q_start = q_start
        self.kv_start = kv_start
        self.Sq = Sq
        self.Skv = Skv
        self.PACKED = gl.constexpr(PACKED)

    @gluon.jit
    def of_all(shares, n_q_tiles, Hq, heads_per_kv, Sq, Skv):
        """The share of a program in all tiles of a dense call."""
        program = gl.program_id(0)
        first = program * shares.distance + gl.minimum(program, shares.further)
        first = first * shares.unit
        count = (shares.each + (program < shares.rest).to(gl.int32)) * shares.unit
        index = first // n_q_tiles
        head = index % Hq
        tile = HeadTile(index // Hq, head // heads_per_kv, head % heads_per_kv, first % n_q_tiles)
        heads = (heads_per_kv, Hq // heads_per_kv)
        step = (shares.step, shares.step_b)
        none = Sq * 0
        return HeadTiles(tile, count, step, n_q_tiles, heads, none, none, Sq, Skv, False)

    @gluon.jit
    def of_sequence(order_ptr, B, heads, KEYS: gl.constexpr):
        """The tiles of one packed sequence and some heads that share their keys: none, if the
        sequence has more than KEYS keys, or none."""
        Hq, heads_per_kv, heads_of_program = heads
        programs = Hq // heads_of_program
        place = gl.program_id(0) // programs
        head = gl.program_id(0) % programs * heads_of_program
        at = order_ptr + ORDER_HEAD + (B + 1) + place * 4
        len_q = gl.load(at + 1)
        len_kv = gl.load(at + 3)
        n_q_tiles = gl.cdiv(len_q, ROWS)
        is_short = (len_kv > 0) & (len_kv <= KEYS)
        count = gl.where(is_short, n_q_tiles * heads_of_program, 0)
        none = B * 0
        tile = HeadTile(none, head // heads_per_kv, head % heads_per_kv, none)
        heads = (heads_per_kv, Hq // heads_per_kv)
        step = (none + 1, none)
        starts = (gl.load(at), gl.load(at + 2))
        return HeadTiles(
            tile, count, step, n_q_tiles, heads, starts[0], starts[1], len_q, len_kv, True
        )

    @gluon.jit
    def behind(self, tile):
        """The tile behind one."""
        q_tile = tile.q_tile + 1
        ends_head = q_tile == self.n_q_tiles
        member = tile.member + ends_head.to(gl.int32)
        ends_keys = member == self.heads_per_kv
        kv_head = tile.kv_head + gl.where(ends_keys, self.step, 0)
        batch = tile.batch + gl.where(ends_keys, self.step_b, 0)
        ends_batch = kv_head >= self.Hkv
        return HeadTile(
            batch + ends_batch.to(gl.int32),
            kv_head - gl.where(ends_batch, self.Hkv, 0),
            gl.where(ends_keys, 0, member),
            gl.where(ends_head, 0, q_tile),
        )

    @gluon.jit
    def head_of(self, tile):
        return tile.kv_head * self.heads_per_kv + tile.member

    @gluon.jit
    def q_at(self, tile):
        """Where a tile lies in the tensor map of the queries, and in that of the results."""
        return coordinates(
            tile.batch, self.q_start, self.Sq, self.head_of(tile), tile.q_tile * ROWS, 0,
            self.PACKED,
        )  # fmt: skip

    @gluon.jit
    def kv_at(self, tile, first=0):
        """Where its keys are in their tensor map, from the `first` on, and its values in theirs."""
        return coordinates(
            tile.batch, self.kv_start, self.Skv, tile.kv_head, first, 0, self.PACKED
        )  # fmt: skip

    @gluon.jit
    def key_end(self, q_idx, right, HAS_RIGHT: gl.constexpr):
        """The first key behind those that rows q_idx [ROWS] see."""
        end = q_idx * 0 + self.Skv
        if HAS_RIGHT:
            end = gl.minimum(end, q_idx + (self.Skv - self.Sq + right + 1))
        return end
