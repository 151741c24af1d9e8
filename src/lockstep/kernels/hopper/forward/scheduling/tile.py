"""One tile of queries: where it lies in its tensors."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon

# More blocks than there are.
EVERY_BLOCK = gl.constexpr(1 << 30)


@aggregate
class Keys:
    """Which part of its keys a tile sees (`key_parts.py`)."""

    part: gl.tensor
    n_parts: gl.tensor
    slot: gl.tensor  # where the first part goes
    first_block: gl.tensor
    end_block: gl.tensor

    @gluon.constexpr_function
    def __init__(self, part, n_parts, slot, first_block, end_block):
        self.part = part
        self.n_parts = n_parts
        self.slot = slot
        self.first_block = first_block
        self.end_block = end_block

    @gluon.jit
    def every(like):
        """All of them; `like` is any int32."""
        zero = like * 0
        return Keys(zero, zero + 1, zero, zero, zero + EVERY_BLOCK)


@aggregate
class Tile:
    """Rows are those of one head, or of a group of heads (`grouped_rows.py`)."""

    exists: gl.tensor
    head: gl.tensor  # of a group, the first
    kv_head: gl.tensor
    batch: gl.tensor
    q_idx: gl.tensor  # first row, counted in its sequence, of all heads that share it
    q_start: gl.tensor  # the sequence's first query row in the tensor
    kv_start: gl.tensor  # and its first key
    len_q: gl.tensor  # of the sequence; where tiles are split, up to the end of the tile
    len_kv: gl.tensor
    keys: Keys

    @gluon.constexpr_function
    def __init__(self, exists, head, kv_head, batch, q_idx, q_start, kv_start, len_q, len_kv, keys):
        self.exists = exists
        self.head = head
        self.kv_head = kv_head
        self.batch = batch
        self.q_idx = q_idx
        self.q_start = q_start
        self.kv_start = kv_start
        self.len_q = len_q
        self.len_kv = len_kv
        self.keys = keys

    @gluon.jit
    def with_keys(self, keys):
        return Tile(
            self.exists, self.head, self.kv_head, self.batch, self.q_idx, self.q_start,
            self.kv_start, self.len_q, self.len_kv, keys,
        )  # fmt: skip
