"""How a problem is cut into programs: tile sizes, spans, runs of spans.

What decides the bits of a row are `Tiles.BLOCK_KV`, how the warps share a row's scores, and whether
its sequence is folded span by span or computed straight: functions of the head dims, the dtype, the
kind of GPU and of how many rows the sequence has itself. All the rest, which follows the batch and
the number of multiprocessors, decides only which program computes what.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from lockstep.problem import AttentionProblem

# The least number of keys between two folds: also what a program of split-KV has to do at least.
LEAST_SPAN = 256
# Programs with which one sequence keeps a GPU busy by itself, and half of which nearly do.
BUSY = 256
# From how many times the least on a span is worth its fold, even if half as many would nearly do.
LONG = 4
# Up to how many times the least a sequence is not worth being cut at all.
SHORT = 2
# Programs that a multiprocessor can have at once.
PROGRAMS_PER_MULTIPROCESSOR = 2
# So many programs wanted that every span has the least number of keys.
EVERY_SPAN = 1 << 30
# The largest workspace that is worth keeping all multiprocessors busy.
MAX_PARTS_BYTES = 1 << 29


@dataclass(frozen=True)
class Device:
    """The properties of a device that a plan depends on."""

    multiprocessors: int
    shared_bytes: int
    tma: bool
    tensor_memory: bool = False  # from sm_100 on, large products accumulate there
    early: bool = False  # whether a kernel can start while the one before it still runs
    least_block: int = 16  # what the head dims of tiles of 16-bit factors are padded to at least

    @property
    def has_fast_bf16(self) -> bool:
        """Whether six products of bf16 take less time than one of float32 and fit: so it is on
        Hopper, and this much shared memory is what their tiles need. Tensor memory has no room."""
        return self.is_hopper and self.shared_bytes >= 200 << 10

    @property
    def is_hopper(self) -> bool:
        """Whether large products read shared memory and accumulate in registers."""
        return self.tma and not self.tensor_memory


INTERPRETER = Device(multiprocessors=1, shared_bytes=1 << 20, tma=True)


@dataclass(frozen=True)
class Tiles:
    """One way to cut the work of one KV head.

    As long as each warp has whole rows of scores, as with 16 rows per warp, a row's sums are the
    same in tiles of any BLOCK_Q.
    """

    BLOCK_Q: int
    BLOCK_KV: int
    num_warps: int
    num_stages: int
    registers: int | None = None  # of a thread, at most

    @property
    def options(self) -> dict[str, int]:
        """The options with which a kernel is compiled."""
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


@dataclass(frozen=True)
class Plan:
    """How one problem is cut into programs."""

    tiles: Tiles
    precision: str  # see `products`
    BLOCK_D: int
    BLOCK_DV: int
    wanted: int  # programs that the spans of one sequence should make, see `span_of`
    n_slots: int  # tiles of query rows per KV head: of one sequence, or of all packed ones
    n_programs: int  # over all KV heads and sequences
    n_spans: int
    run_spans: int  # spans of one program
    n_runs: int  # programs side by side over the spans of one tile of rows; 1: nothing is split
    tma: bool
    early: bool


def block_of(head_dim: int, least: int = 16) -> int:
    """The power of two that a head dim is padded to inside tiles."""
    return max(least, 1 << (head_dim - 1).bit_length())


def blocks_of(problem: AttentionProblem, device: Device) -> tuple[int, int]:
    """BLOCK_D and BLOCK_DV."""
    # Float32 may be multiplied as terms of 16 bits.
    in_16_bits = problem.dtype != torch.float32 or precision_of(problem, device) == "bf16x6"
    least = device.least_block if in_16_bits else 16
    return block_of(problem.D, least), block_of(problem.Dv, least)


_HALF_TWO = Tiles(64, 128, 4, 3)
# On Hopper three programs of four warps, with 168 registers each, share a multiprocessor: while one
# of them begins or ends, two are busy. A stage less makes room for the third.
_HALF_THREE = Tiles(64, 128, 4, 2, registers=168)
# By the larger of the padded head dims: for many rows, and for a few that are split.
_HALF = {
    64: (_HALF_TWO, Tiles(16, 128, 1, 3)),
    128: (Tiles(64, 64, 4, 3), Tiles(16, 64, 1, 3)),
    256: (Tiles(128, 64, 8, 2), Tiles(64, 64, 4, 2)),
    512: (Tiles(32, 16, 8, 2), Tiles(32, 16, 8, 2)),
}
# Without TMA, addresses take registers: smaller tiles, or more warps.
_HALF_BY_POINTERS = {
    64: (Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3)),
    128: (Tiles(64, 64, 8, 3), Tiles(64, 64, 8, 3)),
    256: (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
    512: (Tiles(32, 16, 8, 2), Tiles(32, 16, 8, 2)),
}
_SINGLE = {
    64: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    128: (Tiles(16, 32, 4, 2), Tiles(16, 32, 4, 2)),
    256: (Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 2)),
    512: (Tiles(16, 16, 8, 1), Tiles(16, 16, 8, 1)),
}
_SINGLE_BY_POINTERS = {**_SINGLE, 128: (Tiles(16, 16, 8, 2), Tiles(16, 16, 8, 2))}
# Tensor cores take float32 for tf32. The first table does with 99 KB of shared memory.
_TF32 = {
    64: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    128: (Tiles(64, 32, 8, 2), Tiles(64, 32, 8, 2)),
    256: (Tiles(32, 16, 8, 2), Tiles(32, 16, 8, 2)),
    512: _SINGLE[512],
}
# Six products of bf16 for one of float32.
_BF16X6 = {
    64: (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: (Tiles(128, 32, 8, 2), Tiles(128, 32, 8, 2)),
    256: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    512: _SINGLE[512],
}
_TF32_HOPPER = {
    64: (Tiles(64, 64, 4, 2), Tiles(64, 64, 4, 2)),
    128: (Tiles(64, 32, 4, 2), Tiles(64, 32, 4, 2)),
    256: (Tiles(32, 32, 4, 2), Tiles(32, 32, 4, 2)),
    512: _SINGLE[512],
}


def precision_of(problem: AttentionProblem, device: Device) -> str:
    """How float32 factors are multiplied, see `products`."""
    if problem.allow_tf32:
        return "tf32"
    return "bf16x6" if problem.dtype == torch.float32 and device.has_fast_bf16 else "ieee"


def tiles_of(problem: AttentionProblem, device: Device) -> tuple[Tiles, Tiles]:
    """The tiles for many query rows, and those for a few that are split over many programs."""
    size = max(64, block_of(problem.D), block_of(problem.Dv))
    precision = precision_of(problem, device)
    if precision == "tf32":
        by_descriptors, by_pointers = _TF32_HOPPER if device.is_hopper else _TF32, _TF32
    elif precision == "bf16x6":
        by_descriptors, by_pointers = _BF16X6, _BF16X6
    elif problem.dtype == torch.float32:
        by_descriptors, by_pointers = _SINGLE, _SINGLE_BY_POINTERS
    else:
        by_descriptors, by_pointers = _HALF, _HALF_BY_POINTERS
    many, few = (by_descriptors if device.tma else by_pointers)[size]
    if _shared_bytes(problem, many, 1, *blocks_of(problem, device)) > device.shared_bytes:
        many, few = by_pointers[size]
    # What comes out of tensor memory is laid out, and so summed, in another way.
    return many, many if device.tensor_memory else few


def stages_of(problem: AttentionProblem, plan: Plan, shared_bytes: int) -> int:
    """How many tiles of keys and values can be under way at once."""
    blocks, split = (plan.BLOCK_D, plan.BLOCK_DV), plan.n_runs > 1
    stages = plan.tiles.num_stages
    while stages > 1 and _shared_bytes(problem, plan.tiles, stages, *blocks, split) > shared_bytes:
        stages -= 1
    return stages


def _shared_bytes(
    problem: AttentionProblem,
    tiles: Tiles,
    stages: int,
    BLOCK_D: int,
    BLOCK_DV: int,
    split: bool = False,
) -> int:
    """The shared memory of the queries and of stages of keys and values, and some for barriers and
    sums.

    Results leave through the memory of both. Parts leave while other tiles are under way, and need
    their own: for half a tile, see `spans.store_part`.
    """
    queries = problem.dtype.itemsize * tiles.BLOCK_Q * BLOCK_D
    stage = problem.dtype.itemsize * tiles.BLOCK_KV * (BLOCK_D + BLOCK_DV)
    if problem.bias_shape is not None:
        stage += 4 * tiles.BLOCK_Q * tiles.BLOCK_KV
    results = problem.dtype.itemsize * tiles.BLOCK_Q * BLOCK_DV
    parts = 2 * tiles.BLOCK_Q * BLOCK_DV if split else 0
    return max(queries + stages * stage, results) + parts + 1024


def span_of(problem: AttentionProblem, q_len: int, kv_len: int) -> int:
    """How many keys a sequence has between two folds.

    Folding costs, so a sequence has as many spans as it takes to keep a GPU busy with it alone, and
    half as many if they would be short: one with many rows, or few keys, is computed straight. That
    depends on its own lengths, and so its bits do. With `query_invariant` they may not, and all
    spans have the same size.
    """
    left, right = problem.window
    reach = kv_len
    if left is not None and right is not None:
        reach = min(kv_len, left + right + q_len)
    if _is_short(problem, reach):
        return SHORT * LEAST_SPAN
    short, long = (-(-reach // n_spans) for n_spans in _spans_wanted(problem, q_len))
    return max(1, -(-max(short, min(long, LONG * LEAST_SPAN)) // LEAST_SPAN)) * LEAST_SPAN


def plan_of(
    problem: AttentionProblem, device: Device, own_keys: bool = False, splits: bool = True
) -> Plan:
    """Whole sequences where they keep the multiprocessors busy, runs of spans elsewhere.

    own_keys: Packed sequences are known to have as many keys as queries. splits: Whether spans may
    be shared among programs.
    """
    tiles, few = tiles_of(problem, device)
    n_slots, n_programs = _count(problem, tiles)
    n_spans = 1 if own_keys and _all_straight(problem) else _most_spans(problem)
    part_bytes = 4 * (problem.Dv + 1) * n_spans * math.prod(problem.lse_shape)
    n_runs = 1
    if splits and n_spans > 1 and part_bytes <= MAX_PARTS_BYTES:
        n_runs = _runs(n_spans, n_programs, PROGRAMS_PER_MULTIPROCESSOR * device.multiprocessors)
    run_spans = -(-n_spans // n_runs)
    n_runs = -(-n_spans // run_spans)
    blocks = blocks_of(problem, device)
    if n_runs > 1:
        # Masked tiles have two stages whatever the others have.
        fits = _shared_bytes(problem, tiles, 2, *blocks, split=True) <= device.shared_bytes
        if problem.Sq * (problem.Hq // problem.Hkv) <= few.BLOCK_Q or not fits:
            tiles = few
            n_slots, n_programs = _count(problem, tiles)
    elif device.is_hopper and problem.bias_shape is None and tiles == _HALF_TWO:
        # With a bias, or parts in shared memory, three do not fit. With secret lengths ptxas 12.8
        # does not survive their build.
        tiles = _HALF_TWO if problem.secret_lengths else _HALF_THREE
    return Plan(
        tiles,
        precision_of(problem, device),
        *blocks,
        _wanted(problem),
        n_slots,
        n_programs,
        n_spans,
        run_spans,
        n_runs,
        device.tma,
        device.early,
    )


def _runs(n_spans: int, n_programs: int, at_once: int) -> int:
    """Into how many runs the spans are best put, each run of each tile of rows being a program."""

    def rounds(n_runs: int) -> int:
        return -(-n_programs * n_runs // at_once) * -(-n_spans // n_runs)

    # Parts take time as well: few runs if they do nearly as well as many.
    enough = 1.1 * min(map(rounds, range(1, n_spans + 1)))
    return next(n_runs for n_runs in range(1, n_spans + 1) if rounds(n_runs) <= enough)


def _wanted(problem: AttentionProblem) -> int:
    return EVERY_SPAN if problem.query_invariant else BUSY


def _is_short(problem: AttentionProblem, reach: int) -> bool:
    return reach <= SHORT * LEAST_SPAN and not problem.query_invariant


def _most_spans(problem: AttentionProblem) -> int:
    """The most spans that any sequence of the problem can have."""
    if _is_short(problem, problem.Skv):
        return 1
    q_len = 1 if problem.is_packed else problem.Sq
    many, few = _spans_wanted(problem, q_len)
    # As far as a span is short, there are few of them.
    in_any = max(few, min(many, -(-problem.Skv // (LONG * LEAST_SPAN))))
    # A window sees few of the spans between the first key and the last.
    in_longest = -(-problem.Skv // span_of(problem, q_len, problem.Skv))
    return max(1, in_longest, min(in_any, -(-problem.Skv // LEAST_SPAN)))


def _all_straight(problem: AttentionProblem) -> bool:
    """Whether any sequence with as many keys as queries has one span.

    `span_of` has a rule for few keys, one for some and one for many. As rows grow with the keys, a
    rule that gives its shortest sequence one span gives all of its sequences one.
    """
    shortest = (LEAST_SPAN + 1, SHORT * LEAST_SPAN + 1, LONG * LEAST_SPAN + 1)
    return all(span_of(problem, n, n) >= n for n in shortest if n <= problem.Skv)


def _spans_wanted(problem: AttentionProblem, q_len: int) -> tuple[int, int]:
    """How many spans make as many programs as are wanted, and how many make half of them."""
    tiles = max(1, -(-q_len * (problem.Hq // problem.Hkv) // 64) * problem.Hkv)
    wanted = _wanted(problem)
    return -(-wanted // tiles), -(-(wanted // 2) // tiles)


def _count(problem: AttentionProblem, tiles: Tiles) -> tuple[int, int]:
    """`n_slots` and `n_programs` of a plan."""
    rows = problem.Sq * (problem.Hq // problem.Hkv)
    if problem.is_packed:
        # As `sequences.find_sequence` hands them out, with one more for rows that no sequence owns.
        n_slots = rows // tiles.BLOCK_Q + problem.B + 1
        return n_slots, n_slots * problem.Hkv
    n_slots = -(-rows // tiles.BLOCK_Q)
    return n_slots, n_slots * problem.Hkv * problem.B
