"""One tile of queries: where it lies in its tensors."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import aggregate, gl, gluon


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

    @gluon.constexpr_function
    def __init__(self, exists, head, kv_head, batch, q_idx, q_start, kv_start, len_q, len_kv):
        self.exists = exists
        self.head = head
        self.kv_head = kv_head
        self.batch = batch
        self.q_idx = q_idx
        self.q_start = q_start
        self.kv_start = kv_start
        self.len_q = len_q
        self.len_kv = len_kv
