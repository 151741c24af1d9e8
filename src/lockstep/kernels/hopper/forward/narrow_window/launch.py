"""The launch of `kernel.py`."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from lockstep.kernels.hopper.common.sizes import columns
from lockstep.kernels.hopper.forward.narrow_window.kernel import narrow_window_kernel
from lockstep.kernels.hopper.forward.narrow_window.plan import REGISTERS, STEP, parts_of, sizes_of
from lockstep.kernels.hopper.forward.scheduling.schedule import BY_HEAD, LONGEST_FIRST, UNSORTED
from lockstep.kernels.hopper.forward.scheduling.tiling import Tiling
from lockstep.kernels.hopper.forward.shapes import (
    by_head,
    describe_pages,
    key_numbers,
    layout_of,
    names_of,
    row_strides,
    scales,
    tiles_of,
)
from lockstep.kernels.launch import Launch
from lockstep.memory_order import empty_like
from lockstep.problem import AttentionProblem, Tensors

PANEL = 64  # columns of a box


def window_tiling(problem: AttentionProblem, n_processors: int) -> Tiling:
    """Chunks of groups of heads, as `Tiling` has tiles of heads."""
    sizes = sizes_of(problem)
    if problem.is_packed:
        groups, n_chunks = problem.Hq // sizes.heads, problem.Sq // sizes.chunk + problem.B + 1
        # Lengths of keys in pages are in the sequence order alone.
        is_sorted = groups * n_chunks > n_processors or problem.is_paged
        order = LONGEST_FIRST if is_sorted else UNSORTED
        return Tiling(n_chunks, groups, order.value)
    groups = problem.B * problem.Hq // sizes.heads
    return Tiling(-(-problem.Sq // sizes.chunk), groups, BY_HEAD.value)


def window_launch(problem: AttentionProblem, q: Tensor, fitted: Tensors, tiles: Tiling) -> Launch:
    """The launch of `narrow_window_kernel`; results lie as q does, of which `fitted` may have a
    copy."""
    parts = parts_of(sizes_of(problem), tiles.n_tickets)
    return Launch(
        narrow_window_kernel,
        (tiles.n_tickets * parts,),
        _numbers(problem, q, fitted, tiles) | _constants(problem) | {"parts": parts},
        maps=_maps(problem, q, fitted),
        names=names_of(problem),
        num_warps=4,
        maxnreg=REGISTERS[sizes_of(problem).programs],
        # Behind the kernel that lists the sequences: `decode/tiles.py`.
        launch_pdl=problem.is_packed and problem.is_paged,
    )


def _numbers(
    problem: AttentionProblem, q: Tensor, fitted: Tensors, tiles: Tiling
) -> dict[str, float]:
    sizes = sizes_of(problem)
    return {
        "scale": scales(problem)[1],
        **row_strides(problem, q),
        "order": tiles.order,
        "n_chunks": tiles.n_q_tiles,
        "groups": tiles.heads,
        "groups_of_sequence": problem.Hq // sizes.heads,
        "groups_per_kv": problem.Hq // problem.Hkv // sizes.heads,
        "B": problem.B,
        "Sq": problem.Sq,
        "Skv": problem.Skv,
        "left": problem.window[0],
        "right": problem.window[1],
        "o_batch_rows": _batch_rows(problem, q),
        **key_numbers(problem, fitted),
        "page_size": problem.page_size or 1,
    }


def _batch_rows(problem: AttentionProblem, q: Tensor) -> int:
    """From one batch to the next in the ragged map of out."""
    if problem.is_packed or problem.B == 1:
        return 0
    out = empty_like(q, problem.out_shape, device="meta")
    return out.stride(0) // tiles_of(out, 1, PANEL, True).strides[3]


def _constants(problem: AttentionProblem) -> dict[str, Any]:
    sizes = sizes_of(problem)
    return {
        "LAYOUT": layout_of(problem),
        "PAGED": problem.is_paged,
        "SCORES": scales(problem)[0],
        "HAS_SINKS": problem.has_sinks,
        "D": columns(problem.D),
        "DV": columns(problem.Dv),
        "POSITIONS": sizes.positions,
        "CHUNK": sizes.chunk,
        "KEYS": sizes.keys,
        "KV_ROWS": sizes.kv_rows,
        "BEFORE": sizes.before,
        "FROM": sizes.until,
        "STAY": sizes.stay,
    }


def _maps(problem: AttentionProblem, q: Tensor, fitted: Tensors) -> dict[str, Any]:
    sizes, layout = sizes_of(problem), layout_of(problem)
    packed, ragged = layout == "varlen", layout != "dense"
    box = [1, 1, sizes.heads, sizes.positions, PANEL]
    out = by_head(empty_like(q, problem.out_shape, device="meta"), packed)
    of_queries = tiles_of(by_head(fitted.q, packed), 1, PANEL, packed)._replace(block=box)
    of_results = tiles_of(out, 1, PANEL, True)._replace(block=box)
    maps = {"q": of_queries.describe, "o": of_results.describe}
    if problem.is_paged:
        return maps | {
            "k": partial(describe_pages, STEP, "nan"),
            "v": partial(describe_pages, STEP, "zero"),
        }
    return maps | {
        "k": tiles_of(by_head(fitted.k, packed), STEP, PANEL, ragged).describe,
        "v": tiles_of(by_head(fitted.v, packed), STEP, PANEL, ragged).describe,
    }
