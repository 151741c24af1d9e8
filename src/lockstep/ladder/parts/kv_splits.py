"""Pieces of split_kv: attention of a query tile to some of its keys, parts written and joined.

A block has 8 x 8 threads; thread (ty, tx) has rows ty + 8i and keys tx + 8j of a tile. The head dim
is tiled by 16 in both products.
"""

from __future__ import annotations

from lockstep import simt
from lockstep.simt import Constant, cuda, float32

from .rows import EMPTY, FULL, VECTOR

SIDE = 8  # threads along each dimension of a tile
THREADS = SIDE * SIDE
D_TILE = 16  # columns of the head dim at a time, in both products
PITCH = D_TILE + 4  # floats: eight rows, sixteen bytes of each, meet all 32 banks
P_PAD = 8


@simt.device
def stage_columns(tile, source, first, col0, present, BLOCK: Constant):
    """Columns col0 to col0 + 15 of BLOCK rows as float32; rows from `present` on become zero."""
    for i in range(cuda.threadIdx.x, BLOCK * D_TILE // VECTOR, THREADS):
        row = i // (D_TILE // VECTOR)
        col = i % (D_TILE // VECTOR) * VECTOR
        if row < present:
            part = cuda.vload(source, (first + row, col0 + col), VECTOR)
            cuda.vstore(
                tile,
                (row, col),
                cuda.vec(float32(part[0]), float32(part[1]), float32(part[2]), float32(part[3])),
            )
            cuda.vstore(
                tile,
                (row, col + 4),
                cuda.vec(float32(part[4]), float32(part[5]), float32(part[6]), float32(part[7])),
            )
        else:
            cuda.vstore(tile, (row, col), cuda.vec(0.0, 0.0, 0.0, 0.0))
            cuda.vstore(tile, (row, col + 4), cuda.vec(0.0, 0.0, 0.0, 0.0))


@simt.device
def add_scores(s, q_part, k_part, ty, tx, R: Constant):
    """s[i, j] += q · k over the 16 columns in shared memory."""
    queries = cuda.local.array((R, 4), float32)
    for d in range(0, D_TILE, 4):
        for i in range(R):
            a = cuda.vload(q_part, (ty + SIDE * i, d), 4)
            queries[i, 0] = a.x
            queries[i, 1] = a.y
            queries[i, 2] = a.z
            queries[i, 3] = a.w
        for j in range(R):
            b = cuda.vload(k_part, (tx + SIDE * j, d), 4)
            for i in range(R):
                s[i, j] += queries[i, 0] * b.x
                s[i, j] += queries[i, 1] * b.y
                s[i, j] += queries[i, 2] * b.z
                s[i, j] += queries[i, 3] * b.w


@simt.device
def add_values(acc, t, p_tile, v_part, ty, tx, BLOCK: Constant, R: Constant):
    """acc[t, i, :] += p · v for two of the 16 columns in shared memory."""
    for kv in range(0, BLOCK, 4):
        a = cuda.vload(v_part, (kv, 2 * tx), 2)
        b = cuda.vload(v_part, (kv + 1, 2 * tx), 2)
        c = cuda.vload(v_part, (kv + 2, 2 * tx), 2)
        d = cuda.vload(v_part, (kv + 3, 2 * tx), 2)
        for i in range(R):
            p = cuda.vload(p_tile, (ty + SIDE * i, kv), 4)
            acc[t, i, 0] += p.x * a.x
            acc[t, i, 1] += p.x * a.y
            acc[t, i, 0] += p.y * b.x
            acc[t, i, 1] += p.y * b.y
            acc[t, i, 0] += p.z * c.x
            acc[t, i, 1] += p.z * c.y
            acc[t, i, 0] += p.w * d.x
            acc[t, i, 1] += p.w * d.y


@simt.device
def attend(
    acc,  # [D // D_TILE, R, 2] of each thread
    m,
    l,
    s,  # [R, R] of each thread
    q_part,
    kv_part,
    p_tile,
    q,
    k,
    v,
    first,  # row of q with the head's first token
    first_key,  # row of k and v with it
    first_q,
    begin,  # keys that the block attends to
    end,
    seq,
    scale_log2,
    D: Constant,
    BLOCK: Constant,
    R: Constant,
    CAUSAL: Constant,
):
    """acc, m and l of a query tile over keys begin to end - 1; l is still to be summed over the
    eight threads of a row."""
    tx = cuda.threadIdx.x % SIDE
    ty = cuda.threadIdx.x // SIDE
    for i in range(R):
        m[i] = EMPTY
        l[i] = 0.0
        for t in range(D // D_TILE):
            acc[t, i, 0] = 0.0
            acc[t, i, 1] = 0.0

    for first_kv in range(begin, end, BLOCK):
        with simt.phase("scores"):
            for i in range(R):
                for j in range(R):
                    s[i, j] = 0.0
            for t in range(D // D_TILE):
                # the columns before are still being read
                cuda.syncthreads()
                stage_columns(q_part, q, first + first_q, t * D_TILE, seq - first_q, BLOCK)
                stage_columns(kv_part, k, first_key + first_kv, t * D_TILE, seq - first_kv, BLOCK)
                cuda.syncthreads()
                add_scores(s, q_part, kv_part, ty, tx, R)

        with simt.phase("softmax"):
            for i in range(R):
                limit = seq
                if CAUSAL:
                    limit = min(seq, first_q + ty + SIDE * i + 1)
                top = EMPTY
                for j in range(R):
                    seen = first_kv + tx + SIDE * j < limit
                    s[i, j] = s[i, j] * scale_log2 if seen else EMPTY
                    top = max(top, s[i, j])
                # a row lies in eight neighbouring lanes
                for hop in range(3):
                    top = max(top, cuda.shfl_xor_sync(FULL, top, 1 << hop))
                top = max(top, m[i])
                # a row that has seen no key yet: infinity minus infinity would be NaN
                base = 0.0 if top == EMPTY else top
                factor = cuda.exp2(m[i] - base)
                m[i] = top
                l[i] *= factor
                for j in range(R):
                    p = cuda.exp2(s[i, j] - base)
                    p_tile[ty + SIDE * i, tx + SIDE * j] = p
                    l[i] += p
                for t in range(D // D_TILE):
                    acc[t, i, 0] *= factor
                    acc[t, i, 1] *= factor

        with simt.phase("output"):
            for t in range(D // D_TILE):
                cuda.syncthreads()
                stage_columns(kv_part, v, first_key + first_kv, t * D_TILE, seq - first_kv, BLOCK)
                cuda.syncthreads()
                add_values(acc, t, p_tile, kv_part, ty, tx, BLOCK, R)


@simt.device
def write_part(
    part_o, part_m, part_l, entry, acc, m, l, D: Constant, R: Constant
):  # fmt: skip
    """A block's part into rows from `entry` on of the workspace."""
    tx = cuda.threadIdx.x % SIDE
    ty = cuda.threadIdx.x // SIDE
    for i in range(R):
        row = entry + ty + SIDE * i
        for t in range(D // D_TILE):
            pair = cuda.vec(acc[t, i, 0], acc[t, i, 1])
            cuda.vstore(part_o, (row, t * D_TILE + 2 * tx), pair)
        for hop in range(3):
            l[i] += cuda.shfl_xor_sync(FULL, l[i], 1 << hop)
        if tx == 0:
            part_m[row] = m[i]
            part_l[row] = l[i]


@simt.device
def join_tile(
    part_o,  # [entries · BLOCK, D]
    part_m,
    part_l,
    out,  # [B·H·S, D]
    entry,  # number of the tile's first part
    used,  # its parts
    first_q,
    first,  # row of the head's first token
    seq,
    D: Constant,
    BLOCK: Constant,
    JOINERS: Constant,  # threads
    DTYPE: Constant,
):
    """The output rows of a query tile from its parts, always in the same order."""
    for i in range(cuda.threadIdx.x, BLOCK * D // 4, JOINERS):
        row = i // (D // 4)
        col = i % (D // 4) * 4
        if first_q + row < seq:
            m = EMPTY
            for part in range(used):
                m = max(m, part_m[(entry + part) * BLOCK + row])
            l = 0.0
            x = 0.0
            y = 0.0
            z = 0.0
            w = 0.0
            for part in range(used):
                at = (entry + part) * BLOCK + row
                factor = cuda.exp2(part_m[at] - m)
                l += factor * part_l[at]
                o = cuda.vload(part_o, (at, col), 4)
                x += factor * o.x
                y += factor * o.y
                z += factor * o.z
                w += factor * o.w
            inverse = 1.0 / l
            cuda.vstore(
                out,
                (first + first_q + row, col),
                cuda.vec(
                    DTYPE(x * inverse),
                    DTYPE(y * inverse),
                    DTYPE(z * inverse),
                    DTYPE(w * inverse),
                ),
            )
