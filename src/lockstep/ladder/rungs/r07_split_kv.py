"""split_kv: the keys of a query tile are split over blocks; a second kernel joins the parts.

What changed from warp_mma: parallelism. A kernel that gives a query tile to one block has
B·H·S / BLOCK blocks, too few for one long sequence. Here block (q tile, kv block, head) attends to
`kv_tiles` tiles of keys and leaves its part in a workspace, and the reduction joins them:

    m = max mᵢ    l = Σ exp2(mᵢ - m) lᵢ    out = Σ exp2(mᵢ - m) Oᵢ / l

The size of a split is fixed: which keys are added in which order depends on their position alone.
kv_tiles="all" is the kernel's unsplit self. The head dim is tiled by 16 in both products, so that
shared memory holds 16 columns of Q, K or V at a time. Each of the 8 x 8 threads of a block has one
score (tile="8x8") or 8 x 8 of them (tile="64x64").

Heads of queries may share heads of keys and values (--kv-heads): blocks then read the same keys.

With products="mma" the partial kernel is one on tensor cores: see `r07_split_kv_mma`.

With join="last_block" there is one launch: a block counts itself in when its part is written, and
the one that finds all others there joins the parts. Which block that is changes from run to run,
the order in which parts are added does not.

    lockstep trace split_kv --tile 8x8 --kv-tiles 4 --seq 256 --head-dim 128
"""

from __future__ import annotations

from lockstep import simt
from lockstep.ladder.parts.kv_split_plans import in_one_launch, join_plan, joiners, partial_plan
from lockstep.ladder.parts.kv_splits import (
    D_TILE,
    P_PAD,
    PITCH,
    SIDE,
    THREADS,
    attend,
    join_tile,
    write_part,
)
from lockstep.ladder.parts.tiled import walk
from lockstep.ladder.rung import (
    Launch,
    LaunchPlan,
    Problem,
    Rung,
    Tensors,
)
from lockstep.numerics import LOG2E
from lockstep.simt import Constant, cuda, float32, int32

from . import r07_split_kv_mma as mma

TILES = {"64x64": 64, "32x32": 32, "8x8": 8}
KV_TILES = (4, 1, 2, 8, 16, "all")
JOIN = ("kernel", "last_block")
PRODUCTS = ("fma", "mma")


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
    GROUP: Constant,  # heads of queries that share a head of keys
    CAUSAL: Constant,
):
    q_part = cuda.shared.array((BLOCK, PITCH), float32)
    kv_part = cuda.shared.array((BLOCK, PITCH), float32)
    p_tile = cuda.shared.array((BLOCK, BLOCK + P_PAD), float32)
    s = cuda.local.array((R, R), float32)
    acc = cuda.local.array((D // D_TILE, R, 2), float32)
    m = cuda.local.array(R, float32)
    l = cuda.local.array(R, float32)

    first_q = cuda.blockIdx.x * BLOCK
    first = cuda.blockIdx.z * seq  # row of this head's first token
    first_key = first
    if GROUP > 1:
        first_key = cuda.blockIdx.z // GROUP * seq
    end = seq  # of the keys that some row of this block sees
    if CAUSAL:
        end = min(seq, first_q + BLOCK)
    begin = cuda.blockIdx.y * kv_tiles * BLOCK
    if begin >= end:
        return
    end = min(end, begin + kv_tiles * BLOCK)

    attend(
        acc, m, l, s, q_part, kv_part, p_tile, q, k, v, first, first_key, first_q, begin, end, seq,
        scale_log2, D, BLOCK, R, CAUSAL,
    )  # fmt: skip
    with simt.phase("write"):
        q_tile = cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x
        entry = (q_tile * cuda.gridDim.y + cuda.blockIdx.y) * BLOCK
        write_part(part_o, part_m, part_l, entry, acc, m, l, D, R)


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
        join_tile(
            part_o, part_m, part_l, out, entry, used, first_q, cuda.blockIdx.y * seq, seq,
            D, BLOCK, JOINERS, DTYPE,
        )  # fmt: skip


@simt.kernel
def split_in_one_launch(
    q,  # [B·H·S, D]
    k,
    v,
    part_o: float32[:, :],  # [entries · BLOCK, D]: unnormalised outputs
    part_m: float32[:],  # [entries · BLOCK]
    part_l: float32[:],
    finished: int32[:],  # [B·H · query tiles]: blocks that have left their part; 0 between launches
    out,  # [B·H·S, D]
    seq: int32,
    kv_tiles: int32,  # that a block attends to
    scale_log2: float32,
    D: Constant,
    BLOCK: Constant,
    R: Constant,
    GROUP: Constant,
    CAUSAL: Constant,
    DTYPE: Constant,
):
    q_part = cuda.shared.array((BLOCK, PITCH), float32)
    kv_part = cuda.shared.array((BLOCK, PITCH), float32)
    p_tile = cuda.shared.array((BLOCK, BLOCK + P_PAD), float32)
    place = cuda.shared.array(1, int32)  # of this block, among those of its query tile
    s = cuda.local.array((R, R), float32)
    acc = cuda.local.array((D // D_TILE, R, 2), float32)
    m = cuda.local.array(R, float32)
    l = cuda.local.array(R, float32)

    first_q = cuda.blockIdx.x * BLOCK
    first = cuda.blockIdx.z * seq  # row of this head's first token
    first_key = first
    if GROUP > 1:
        first_key = cuda.blockIdx.z // GROUP * seq
    end = seq  # of the keys that some row of this block sees
    if CAUSAL:
        end = min(seq, first_q + BLOCK)
    split_keys = kv_tiles * BLOCK
    used = (end + split_keys - 1) // split_keys  # blocks of this query tile that have keys
    begin = cuda.blockIdx.y * split_keys
    if begin >= end:
        return
    end = min(end, begin + split_keys)

    attend(
        acc, m, l, s, q_part, kv_part, p_tile, q, k, v, first, first_key, first_q, begin, end, seq,
        scale_log2, D, BLOCK, R, CAUSAL,
    )  # fmt: skip
    with simt.phase("write"):
        q_tile = cuda.blockIdx.z * cuda.gridDim.x + cuda.blockIdx.x
        entry = (q_tile * cuda.gridDim.y + cuda.blockIdx.y) * BLOCK
        write_part(part_o, part_m, part_l, entry, acc, m, l, D, R)
        cuda.syncthreads()
        if cuda.threadIdx.x == 0:
            # what the block wrote is handed over, what the others did is taken over
            cuda.threadfence()
            place[0] = cuda.atomic.add(finished, q_tile, 1)
            cuda.threadfence()
        cuda.syncthreads()
    if place[0] == used - 1:
        with simt.phase("join"):
            join_tile(
                part_o, part_m, part_l, out, q_tile * cuda.gridDim.y, used, first_q, first, seq,
                D, BLOCK, THREADS, DTYPE,
            )  # fmt: skip
        if cuda.threadIdx.x == 0:
            cuda.atomic.exch(finished, q_tile, 0)


def _kv_tiles(problem: Problem, block: int, kv_tiles: int | str) -> int:
    """Tiles of keys that a block attends to."""
    return -(-problem.S // block) if kv_tiles == "all" else int(kv_tiles)


def splits_of(problem: Problem, tile: str, kv_tiles: int | str) -> int:
    """Blocks that share the keys of one query tile."""
    block = TILES[tile]
    return -(-problem.S // (block * _kv_tiles(problem, block, kv_tiles)))


def refuses(
    problem: Problem, tile: str, kv_tiles: int | str, join: str, products: str
) -> str | None:
    """The reason for refusing: products by mma have one tile and one way to join, and a workspace
    has no more elements than an int32 index reaches."""
    block = TILES[tile]
    if products == "mma" and (tile, join) != ("64x64", "kernel"):
        return f"split_kv by mma takes tile 64x64 and join kernel, not {tile} and {join}"
    rows = -(-problem.S // block) * splits_of(problem, tile, kv_tiles) * problem.heads * block
    if rows * problem.D < 2**31:
        return None
    return (
        f"split_kv would need a workspace of {rows * problem.D:,} elements, indices reach "
        f"{2**31 - 1:,}; take larger tiles, or more of them per block"
    )


def launches(
    problem: Problem,
    tensors: Tensors,
    tile: str,
    kv_tiles: int | str,
    join: str,
    products: str,
) -> list[Launch]:
    """Partial attention by (query tile, split, head), then the reduction by (query tile, head) if
    it is a kernel of its own."""
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
        "GROUP": problem.group,
    }
    heads = problem.heads
    grid = (q_tiles, splits, heads)
    if join == "last_block":
        finished = torch.zeros(heads * q_tiles, dtype=torch.int32, device=q.device)
        arguments = {**partial, "finished": finished, "out": out, "DTYPE": q.dtype}
        return [Launch(split_in_one_launch, grid, THREADS, arguments)]
    first = Launch(partial_attention, grid, THREADS, partial)
    if products == "mma":
        arguments = {n: x for n, x in partial.items() if n not in ("R", "BLOCK")}
        arguments["DTYPE"] = q.dtype
        first = Launch(mma.partial_attention_mma, grid, mma.THREADS, arguments)
    split_keys = _kv_tiles(problem, block, kv_tiles) * block
    threads = joiners(block, problem.D)
    reduction = {
        **shared,
        "out": out,
        "splits": splits,
        "split_keys": split_keys,
        "JOINERS": threads,
        "DTYPE": q.dtype,
    }
    return [first, Launch(join_parts, (q_tiles, heads), threads, reduction)]


def plans(
    problem: Problem, tile: str, kv_tiles: int | str, join: str, products: str
) -> list[LaunchPlan]:
    """Blocks that lie wholly behind a causal diagonal return at once."""
    block = TILES[tile]
    per_block = _kv_tiles(problem, block, kv_tiles)
    splits = splits_of(problem, tile, kv_tiles)
    reduction = join_plan(problem, block, per_block)
    if products == "mma":
        return [mma.partial_plan(problem, per_block, splits), reduction]
    partial = partial_plan(problem, block, per_block, splits)
    if join == "kernel":
        return [partial, reduction]
    walked = walk(problem, block, block)
    parts = sum(-(-tiles // per_block) for tiles in walked.tiles) * problem.heads
    return [in_one_launch(partial, reduction, parts, walked.q_tiles * problem.heads)]


RUNG = Rung(
    name="split_kv",
    summary="the keys of a tile split over blocks, then joined; head dim tiled by 16",
    launches=launches,
    plans=plans,
    refuses=refuses,
    grouped_heads=True,
    options={"tile": tuple(TILES), "kv_tiles": KV_TILES, "join": JOIN, "products": PRODUCTS},
    variants=(
        {"tile": "8x8", "kv_tiles": 4},
        {"tile": "64x64", "kv_tiles": "all"},
        {"tile": "64x64", "kv_tiles": 4},
        {"join": "last_block"},
        {"kv_tiles": "all", "products": "mma"},
        {"kv_tiles": 4, "products": "mma"},
    ),
    summaries=(
        "the keys of a tile split over blocks, then joined; one score to a thread",
        "8×8 scores to a thread; keys not split",
        "four key tiles to a block, a second kernel joins the parts",
        "one launch: the last block of a query tile joins its parts",
        "both products on fragments; keys not split",
        "both products on fragments; four key tiles to a block",
    ),
)
