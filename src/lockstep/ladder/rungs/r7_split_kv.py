"""split_kv: the keys of a query tile are split over blocks; a second kernel joins the parts.

What changed from warp_mma: parallelism. A kernel that gives a query tile to one block has
B·H·S / BLOCK blocks, too few for one long sequence. Here block (q tile, kv block, head) attends to
`kv_tiles` tiles of keys and leaves its part in a workspace, and the reduction joins them:

    m = max mᵢ    l = Σ exp2(mᵢ - m) lᵢ    out = Σ exp2(mᵢ - m) Oᵢ / l

The size of a split is fixed: which keys are added in which order depends on their position alone.
kv_tiles="all" is the kernel's unsplit self. The head dim is tiled by 16 in both products, so that
shared memory holds 16 columns of Q, K or V at a time. Of the 8 x 8 threads of a block, each has one
score (tile="8x8") or 8 x 8 of them (tile="64x64").

    lockstep trace split_kv --tile 8x8 --kv-tiles 4 --seq 256 --head-dim 128
"""

from __future__ import annotations

from lockstep import simt
from lockstep.ladder.parts.rows import EMPTY, FULL, VECTOR
from lockstep.ladder.parts.tiled import walk
from lockstep.ladder.rung import (
    BYTES,
    SECTOR,
    Launch,
    LaunchPlan,
    PhasePlan,
    Problem,
    Rung,
    Tensors,
    shared_layout,
)
from lockstep.numerics import LOG2E
from lockstep.simt import Constant, cuda, float32, int32

SIDE = 8  # threads along each dimension of a tile
THREADS = SIDE * SIDE
D_TILE = 16  # columns of the head dim at a time, in both products
PITCH = D_TILE + 4  # floats: eight rows, sixteen bytes of each, meet all 32 banks
P_PAD = 8
TILES = {"64x64": 64, "32x32": 32, "8x8": 8}
KV_TILES = (4, 1, 2, 8, 16, "all")


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


@simt.kernel
def partial_attention(
    q,  # [B·H·S, D]
    k,
    v,
    part_o: float32[:, :],  # [entries · BLOCK, D]: unnormalised outputs
    part_m: float32[:],  # [entries · BLOCK]
    part_l: float32[:],
    seq: int32,
    kv_tiles: int32,  # that a block attends to
    scale_log2: float32,
    D: Constant,
    BLOCK: Constant,  # queries, and keys, of a tile
    R: Constant,  # of them for each of the eight threads
    CAUSAL: Constant,
):
    q_part = cuda.shared.array((BLOCK, PITCH), float32)
    kv_part = cuda.shared.array((BLOCK, PITCH), float32)
    p_tile = cuda.shared.array((BLOCK, BLOCK + P_PAD), float32)
    s = cuda.local.array((R, R), float32)
    acc = cuda.local.array((D // D_TILE, R, 2), float32)
    m = cuda.local.array(R, float32)
    l = cuda.local.array(R, float32)

    tx = cuda.threadIdx.x % SIDE
    ty = cuda.threadIdx.x // SIDE
    first_q = cuda.blockIdx.x * BLOCK
    first = cuda.blockIdx.z * seq  # row of this head's first token
    end = seq  # of the keys that some row of this block sees
    if CAUSAL:
        end = min(seq, first_q + BLOCK)
    begin = cuda.blockIdx.y * kv_tiles * BLOCK
    if begin >= end:
        return
    end = min(end, begin + kv_tiles * BLOCK)

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
                stage_columns(kv_part, k, first + first_kv, t * D_TILE, seq - first_kv, BLOCK)
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
                stage_columns(kv_part, v, first + first_kv, t * D_TILE, seq - first_kv, BLOCK)
                cuda.syncthreads()
                add_values(acc, t, p_tile, kv_part, ty, tx, BLOCK, R)

    with simt.phase("write"):
        q_tile = cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x
        entry = (q_tile * cuda.gridDim.y + cuda.blockIdx.y) * BLOCK
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


@simt.kernel
def join_parts(
    part_o: float32[:, :],  # [entries · BLOCK, D]
    part_m: float32[:],
    part_l: float32[:],
    out,  # [B·H·S, D]
    seq: int32,
    splits: int32,  # entries of a query tile
    split_keys: int32,  # keys of one
    D: Constant,
    BLOCK: Constant,
    JOINERS: Constant,  # threads
    CAUSAL: Constant,
    DTYPE: Constant,
):
    first_q = cuda.blockIdx.x * BLOCK
    entry = (cuda.blockIdx.y * cuda.gridDim.x + cuda.blockIdx.x) * splits
    used = splits
    if CAUSAL:  # what lies behind the diagonal was not computed
        used = (min(seq, first_q + BLOCK) + split_keys - 1) // split_keys
    with simt.phase("join"):
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
                    (cuda.blockIdx.y * seq + first_q + row, col),
                    cuda.vec(
                        DTYPE(x * inverse),
                        DTYPE(y * inverse),
                        DTYPE(z * inverse),
                        DTYPE(w * inverse),
                    ),
                )


def _kv_tiles(problem: Problem, block: int, kv_tiles: int | str) -> int:
    """Tiles of keys that a block attends to."""
    return -(-problem.S // block) if kv_tiles == "all" else int(kv_tiles)


def splits_of(problem: Problem, tile: str, kv_tiles: int | str) -> int:
    """Blocks that share the keys of one query tile."""
    block = TILES[tile]
    return -(-problem.S // (block * _kv_tiles(problem, block, kv_tiles)))


def refuses(problem: Problem, tile: str, kv_tiles: int | str) -> str | None:
    """A workspace beyond int32 indices."""
    block = TILES[tile]
    rows = -(-problem.S // block) * splits_of(problem, tile, kv_tiles) * problem.heads * block
    if rows * problem.D < 2**31:
        return None
    return (
        f"split_kv would need a workspace of {rows * problem.D:,} elements, indices reach "
        f"{2**31 - 1:,}; take larger tiles, or more of them per block"
    )


def _joiners(block: int, D: int) -> int:
    """Threads of the reduction: one for every four columns of a row, if a block may have so many.
    Few blocks have to keep many loads under way."""
    return min(1024, block * D // 4)


def launches(problem: Problem, tensors: Tensors, tile: str, kv_tiles: int | str) -> list[Launch]:
    """Partial attention by (query tile, split, head), then the reduction by (query tile, head)."""
    import torch

    q, k, v, out = tensors
    block = TILES[tile]
    q_tiles, splits = -(-problem.S // block), splits_of(problem, tile, kv_tiles)
    rows = q_tiles * splits * problem.heads * block
    part_o = torch.empty(rows, problem.D, device=q.device)
    part_m, part_l = (torch.empty(rows, device=q.device) for _ in range(2))
    shared = {
        "part_o": part_o,
        "part_m": part_m,
        "part_l": part_l,
        "seq": problem.S,
        "D": problem.D,
        "BLOCK": block,
        "CAUSAL": problem.causal,
    }
    partial = {
        **shared,
        "q": q,
        "k": k,
        "v": v,
        "kv_tiles": _kv_tiles(problem, block, kv_tiles),
        "scale_log2": problem.scale * LOG2E,
        "R": block // SIDE,
    }
    split_keys = _kv_tiles(problem, block, kv_tiles) * block
    joiners = _joiners(block, problem.D)
    join = {
        **shared,
        "out": out,
        "splits": splits,
        "split_keys": split_keys,
        "JOINERS": joiners,
        "DTYPE": q.dtype,
    }
    heads = problem.heads
    return [
        Launch(partial_attention, (q_tiles, splits, heads), THREADS, partial),
        Launch(join_parts, (q_tiles, heads), joiners, join),
    ]


def plans(problem: Problem, tile: str, kv_tiles: int | str) -> list[LaunchPlan]:
    """Blocks that lie wholly behind a causal diagonal return at once."""
    S, D, heads, block = problem.S, problem.D, problem.heads, TILES[tile]
    per_block = _kv_tiles(problem, block, kv_tiles)
    splits = splits_of(problem, tile, kv_tiles)
    walked = walk(problem, block, block)
    visited = sum(walked.tiles)
    used = sum(-(-tiles // per_block) for tiles in walked.tiles)  # parts of one head
    d_tiles = D // D_TILE
    entry = block * D + 2 * block
    q_rows = [min(block, S - t * block) for t in range(walked.q_tiles)]
    q_loads = sum(rows * tiles for rows, tiles in zip(q_rows, walked.tiles, strict=True))
    loads = (q_loads + 2 * sum(walked.kv_rows)) * D * BYTES * heads
    steps = min(per_block, max(walked.tiles))
    stores = used * entry * 4 * heads
    partial = LaunchPlan(
        kernel="partial_attention",
        grid=(walked.q_tiles, splits, heads),
        block=THREADS,
        shared_bytes=shared_layout(*[block * PITCH * 4] * 2, block * (block + P_PAD) * 4),
        phases=(
            PhasePlan("scores", block * block, THREADS, D, steps),
            PhasePlan("softmax", block * block, THREADS, 1, steps),
            PhasePlan("output", block * D, THREADS, block, steps),
            PhasePlan("write", block * D // 2, THREADS),
        ),
        iterations=steps,
        barriers=4 * d_tiles * visited * heads,
        load_bytes=loads,
        store_bytes=stores,
        load_sectors=loads // SECTOR,
        # of m and l, a warp writes four rows at a time
        store_sectors=used * (block * D * 4 // SECTOR + 2 * block // 4) * heads,
        workspace=walked.q_tiles * splits * heads * entry,
    )
    return [partial, _join_plan(problem, block, per_block)]


def _join_plan(problem: Problem, block: int, per_block: int) -> LaunchPlan:
    """Every part is read once, the two numbers of a row by all threads that work on it."""
    S, D, heads = problem.S, problem.D, problem.heads
    walked = walk(problem, block, block)
    parts = [-(-tiles // per_block) for tiles in walked.tiles]
    rows = [min(block, S - t * block) for t in range(walked.q_tiles)]
    at_a_time = 128 // D  # rows that a warp works on
    asked, sectors = 0, 0
    for part, row in zip(parts, rows, strict=True):
        asked += part * row * (D // 4) * (16 + 3 * 4)
        sectors += part * (row * D * 4 // SECTOR + 3 * -(-row // at_a_time))
    stores = problem.rows * D * BYTES
    return LaunchPlan(
        kernel="join_parts",
        grid=(walked.q_tiles, heads),
        block=_joiners(block, D),
        shared_bytes=0,
        phases=(PhasePlan("join", block * D // 4, _joiners(block, D), max(parts)),),
        iterations=0,  # it walks over parts, not over tiles of keys
        barriers=0,
        load_bytes=asked * heads,
        store_bytes=stores,
        load_sectors=sectors * heads,
        store_sectors=stores // SECTOR,
    )


RUNG = Rung(
    name="split_kv",
    summary="the keys of a tile split over blocks, then joined; head dim tiled by 16",
    launches=launches,
    plans=plans,
    refuses=refuses,
    options={"tile": tuple(TILES), "kv_tiles": KV_TILES},
    variants=(
        {"tile": "8x8", "kv_tiles": 4},
        {"tile": "64x64", "kv_tiles": "all"},
        {"tile": "64x64", "kv_tiles": 4},
    ),
)
