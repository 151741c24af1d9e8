"""From a problem to a launch: everything but the pointers is worked out once and kept."""

from __future__ import annotations

import math
from collections.abc import Collection
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper.common.copy_engine import copy, fit
from lockstep.kernels.hopper.common.sizes import columns, processors
from lockstep.kernels.hopper.forward.aligned_rows import NAMES, align_launches
from lockstep.kernels.hopper.forward.few_keys import few_keys_kernel
from lockstep.kernels.hopper.forward.groups import BOX, heads_of_box, takes_one_loop
from lockstep.kernels.hopper.forward.idle_windows import without_idle_window
from lockstep.kernels.hopper.forward.kept_keys.launch import kept_keys_launch
from lockstep.kernels.hopper.forward.kept_keys.plan import kept_sizes
from lockstep.kernels.hopper.forward.kernel import forward_kernel
from lockstep.kernels.hopper.forward.narrow_window.launch import window_launch, window_tiling
from lockstep.kernels.hopper.forward.narrow_window.plan import has_narrow_window, sizes_of
from lockstep.kernels.hopper.forward.one_block.kernel import one_block_kernel
from lockstep.kernels.hopper.forward.one_block.shares import Shares
from lockstep.kernels.hopper.forward.plan import (
    CHUNK,
    KEPT_REGISTERS,
    REGISTERS,
    ROWS,
    fixes_maximum,
    has_one_block,
    keeps_keys,
    kept_blocks,
    kept_tiles,
    map_columns,
    one_block_heads,
    one_block_keys,
    one_block_room,
    one_block_rows,
    one_block_shares,
    one_block_widths,
    out_columns,
    padded,
    page_rows,
    plan_of,
    value_columns,
)
from lockstep.kernels.hopper.forward.scheduling.part_memory import (
    PART_NAMES,
    clear_launch,
    part_memory,
)
from lockstep.kernels.hopper.forward.scheduling.part_rule import has_parts
from lockstep.kernels.hopper.forward.scheduling.schedule import UNSORTED
from lockstep.kernels.hopper.forward.scheduling.sequence_order import order_buffer, sort_launch
from lockstep.kernels.hopper.forward.scheduling.tiling import Tiling, n_programs, splits_tiles
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
from lockstep.kernels.kernel import Prepared, Result
from lockstep.kernels.launch import Buffer, Launch, Launches
from lockstep.kernels.window import limit_of
from lockstep.memory_order import empty_like
from lockstep.problem import AttentionProblem, Tensors


def forward_launches(problem: AttentionProblem, tensors: Tensors, n_processors: int) -> Launches:
    """The launches that run one problem with inputs of given strides and alignment."""
    problem = without_idle_window(problem)
    fitted = _fit(problem, tensors)
    copied = [
        name for name, x, y in zip(Tensors._fields, tensors, fitted, strict=True) if x is not y
    ]
    order = None
    block_q, group = plan_of(problem).block_q, 1
    aligned: dict[str, Buffer] = {}
    parts: dict[str, Buffer] = {}
    align: list[Launch] = []
    if has_narrow_window(problem):
        tiles, block_q = window_tiling(problem, n_processors), sizes_of(problem).chunk
        launches = [window_launch(problem, tensors.q, fitted, tiles)]
    elif has_one_block(problem):
        launches = [_one_block_launch(problem, tensors.q, fitted, n_processors)]
    elif kept := kept_sizes(problem):
        launches = [kept_keys_launch(problem, kept, tensors.q, fitted, n_processors)]
    elif keeps_keys(problem):
        launches = [_few_keys_launch(problem, tensors.q, fitted)]
    else:
        parts_too = has_parts(problem)
        tiles = Tiling.of(problem, n_processors, parts_too)
        group = tiles.group
        placed, aligned, align = align_launches(problem, fitted)
        launches = [
            forward_launch(problem, tensors.q, placed, tiles, n_processors, aligned, parts_too)
        ]
        if parts_too:
            parts = part_memory(problem, n_processors)
            launches.insert(0, clear_launch(problem, n_processors))
    if problem.layout == "varlen":
        sorts = tiles.order != UNSORTED.value
        order = order_buffer(problem, tiles.n_tickets, sorts)
        if sorts:
            keys = one_block_keys(problem)
            if keys:
                launches.insert(0, _one_block_launch(problem, tensors.q, fitted, n_processors))
            launches.insert(0, sort_launch(problem, block_q, keys, group))
    launches[:0] = align
    results = {
        "out": Buffer.like(tensors.q, problem.out_shape, problem.dtype),
        "lse": Buffer.like(tensors.q, problem.lse_shape, torch.float32),
    }
    statistics = {"statistics": Buffer.like(tensors.q, problem.statistics_shape, torch.float32)}
    # Without gradients, they are of no further use.
    return Launches(
        tensors.q.device,
        Tensors._fields,
        results | ({} if problem.is_paged else statistics),
        {"sequence_order": order} | aligned | parts | (statistics if problem.is_paged else {}),
        launches,
        fit=partial(_with_copies, copied) if copied else None,
        finish=_without_statistics if problem.is_paged else None,
    )


def _without_statistics(tensors: Tensors, results: list[Tensor], workspace: Any) -> Result:
    out, lse = results
    return out, lse, None


def _with_copies(names: list[str], tensors: Tensors) -> Tensors:
    return tensors._replace(**{name: copy(getattr(tensors, name)) for name in names})


def forward_launch(
    problem: AttentionProblem,
    q: Tensor,
    fitted: Tensors,
    tiles: Tiling,
    n_processors: int,
    aligned: Collection[str] = (),
    parts: bool = False,
    early: bool = False,
) -> Launch:
    """The launch of `forward_kernel`; results lie as q does, of which `fitted` may have a copy.
    Keys and values may be `aligned`. With `parts`, tiles may have several of their keys; of packed
    sequences, it is for those whose tiles have. `early`: the next kernel need not wait for it."""
    names = names_of(problem)
    if parts and problem.is_packed:
        names["sequence_order"] = "cut_order"
    elif not parts:
        names |= dict.fromkeys(PART_NAMES, "lse")
    numbers = _numbers(problem, q, fitted, tiles) | _constants(problem, tiles.group)
    return Launch(
        forward_kernel,
        (n_programs(problem, tiles, n_processors),),
        numbers | {"PARTS": parts, "EARLY": early},
        maps=_maps(problem, q, fitted, tiles.group),
        names=names | {name: x for name, x in NAMES.items() if x in aligned},
        num_warps=4,
        maxnreg=REGISTERS[plan_of(problem).consumers][0],
        launch_pdl=problem.is_packed,
    )


def _few_keys_launch(problem: AttentionProblem, q: Tensor, fitted: Tensors) -> Launch:
    """The launch of `few_keys_kernel`, as `forward_launch` does it."""
    plan, n_q_tiles, tiles = plan_of(problem), -(-problem.Sq // ROWS), kept_tiles(problem)
    scores, scale, softcap = scales(problem)
    numbers = _of_heads(problem, q) | {
        "n_q_tiles": n_q_tiles,
        "tiles_per_program": tiles,
        "right": limit_of(problem.window[1]),
        "scale": scale,
        "softcap": softcap,
    }
    constants = {
        "HAS_RIGHT": problem.window[1] is not None,
        "SCORES": scores,
        "HAS_SINKS": problem.has_sinks,
        "D": problem.D,
        "DV": problem.Dv,
        "BLOCK_KV": plan.block_kv,
        "BLOCKS": kept_blocks(problem),
        "FIXED_MAX": problem.dtype == torch.bfloat16,
    }
    return Launch(
        few_keys_kernel,
        (problem.B * problem.Hq * -(-n_q_tiles // tiles),),
        numbers | constants,
        maps={
            "q": tiles_of(fitted.q, ROWS, padded(problem.D), False).describe,
            "k": tiles_of(fitted.k, plan.block_kv, padded(problem.D), False).describe,
            "v": tiles_of(fitted.v, plan.block_kv, padded(problem.Dv), False).describe,
        },
        names={} if problem.has_sinks else {"sinks": "lse"},
        num_warps=4,
        maxnreg=KEPT_REGISTERS,
    )


def _one_block_launch(
    problem: AttentionProblem, q: Tensor, fitted: Tensors, n_processors: int
) -> Launch:
    """The launch of `one_block_kernel`, as `forward_launch` does it."""
    packed, keys = problem.layout == "varlen", one_block_keys(problem)
    room, registers = one_block_room(problem)
    n_q_tiles = -(-problem.Sq // ROWS)
    if packed:
        # Rows that belong to no sequence have programs, too.
        programs = (problem.B + 1) * (problem.Hq // one_block_heads(problem))
        shares = Shares(0, 0, 0, 0, 0, 0, 0)
    else:
        programs = min(problem.B * problem.Hq * n_q_tiles, n_processors * room)
        shares = one_block_shares(problem, programs)
    scores, scale, _ = scales(problem)
    rows = one_block_rows(keys)
    out = by_head(empty_like(q, problem.out_shape, device="meta"), packed)
    numbers = _of_heads(problem, q) | {
        "n_q_tiles": n_q_tiles,
        **shares._asdict(),
        "heads_of_program": one_block_heads(problem),
        "scale": scale,
        "B": problem.B,
        "right": limit_of(problem.window[1]),
        "keys": keys,
    }
    constants = {
        "PACKED": packed,
        "HAS_RIGHT": problem.window[1] is not None,
        "SCORES": scores,
        "HAS_SINKS": problem.has_sinks,
        "D": problem.D,
        "DV": problem.Dv,
        "WIDTHS": one_block_widths(problem),
    }
    names = {"o": "out"} | ({} if problem.has_sinks else {"sinks": "lse"})
    q, k, v = (by_head(x, packed) for x in fitted[:3])
    return Launch(
        one_block_kernel,
        (programs,),
        numbers | constants,
        maps={
            "q": tiles_of(q, ROWS, padded(problem.D), packed).describe,
            "k": tiles_of(k, rows, padded(problem.D), packed).describe,
            "v": tiles_of(v, rows, padded(problem.Dv), packed).describe,
            "o": tiles_of(out, ROWS, padded(problem.Dv), packed).describe,
        },
        names=names | ({} if packed else {"sequence_order": "lse"}),
        num_warps=4,
        maxnreg=registers,
    )


def _of_heads(problem: AttentionProblem, q: Tensor) -> dict[str, int]:
    """What programs with tiles of queries of few heads need to find them."""
    return {
        **row_strides(problem, q),
        "Hq": problem.Hq,
        "heads_per_kv": problem.Hq // problem.Hkv,
        "Sq": problem.Sq,
        "Skv": problem.Skv,
    }


def _maps(problem: AttentionProblem, q: Tensor, fitted: Tensors, group: int) -> dict[str, Any]:
    plan, layout = plan_of(problem), layout_of(problem)
    packed, ragged = layout == "varlen", layout != "dense"
    width, width_v = map_columns(problem, problem.D), map_columns(problem, problem.Dv)
    out = by_head(empty_like(q, problem.out_shape, device="meta"), packed)
    of_queries = {
        "q": _of_consumer(problem, by_head(fitted.q, packed), width, group),
        "o": _of_consumer(problem, out, out_columns(problem), group),
    }
    if problem.is_paged:
        rows = page_rows(problem)
        return of_queries | {
            "k": partial(describe_pages, rows, "nan", columns=min(width, CHUNK)),
            "v": partial(describe_pages, rows, "zero", columns=min(width_v, CHUNK)),
        }
    k, v = (by_head(x, packed) for x in fitted[1:3])
    return of_queries | {
        "k": tiles_of(k, plan.block_kv, width, ragged).describe,
        "v": tiles_of(v, plan.block_kv, width_v, ragged).describe,
    }


def _of_consumer(problem: AttentionProblem, x: Tensor, width: int, group: int) -> Any:
    """The tensor map of q or out [B, H, S, ·] in tiles of one consumer, or in boxes of them."""
    heads, packed = heads_of_box(group), problem.is_packed
    if heads:
        return tiles_of(x, BOX, min(width, CHUNK), packed, heads).describe
    return tiles_of(x, ROWS, width, packed).describe


def _numbers(
    problem: AttentionProblem, q: Tensor, fitted: Tensors, tiles: Tiling
) -> dict[str, float]:
    left, right = problem.window
    _, scale, softcap = scales(problem)
    return {
        "scale": scale,
        "softcap": softcap,
        **row_strides(problem, q),
        "Dv": problem.Dv,
        "order": tiles.order,
        "n_q_tiles": tiles.n_q_tiles,
        "heads": tiles.heads,
        "Hq": problem.Hq // tiles.group,
        "heads_per_kv": problem.Hq // problem.Hkv,
        "B": problem.B,
        "Sq": problem.Sq,
        "Skv": problem.Skv,
        "left": limit_of(left),
        "right": limit_of(right),
        **key_numbers(problem, fitted, tiles.group),
        "turn": tiles.turn,
        "parts": tiles.parts,
        "page_size": problem.page_size or 0,
    }


def _constants(problem: AttentionProblem, group: int) -> dict[str, Any]:
    plan = plan_of(problem)
    _, of_consumer, of_server = REGISTERS[plan.consumers]
    return {
        "LAYOUT": layout_of(problem),
        "HAS_LEFT": problem.window[0] is not None,
        "HAS_RIGHT": problem.window[1] is not None,
        "SCORES": scales(problem)[0],
        "HAS_SINKS": problem.has_sinks,
        "D_COLUMNS": columns(problem.D),
        "DV_COLUMNS": value_columns(problem.Dv),
        "BLOCK_KV": plan.block_kv,
        "PAGE_ROWS": page_rows(problem) if problem.is_paged else 0,
        "CONSUMERS": plan.consumers,
        "STAGES": plan.stages,
        "PINGPONG": plan.pingpong,
        "FIXED_MAX": fixes_maximum(problem),
        "SECOND_PASS": not problem.constant_time,
        "Q_STAGES": plan.q_stages,
        "SPAN": plan.span // plan.block_kv,
        "TOTAL_COLUMNS": plan.total_columns,
        "ADDS_LATE": plan.adds_late,
        "CONSUMER_REGISTERS": of_consumer,
        "SERVER_REGISTERS": of_server,
        "CONSTANT_TIME": problem.constant_time,
        "ONE_LOOP": takes_one_loop(problem),
        "SPLIT": splits_tiles(problem),
        "HEADS": heads_of_box(group),
        "OUT_COLUMNS": out_columns(problem),
    }


def _fit(problem: AttentionProblem, tensors: Tensors) -> Tensors:
    """Tensors as the copy engine takes them."""
    k, v = _fit_keys(
        tensors.k, tensors.v, share_rows=problem.layout == "dense" and problem.has_kv_lens
    )
    return tensors._replace(q=fit(tensors.q), k=k, v=v)


def prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    """`Kernel.prepare`, of a problem that `supports` lets through."""
    if 0 in problem.out_shape or not problem.Skv:
        return partial(_without_keys, problem)
    return forward_launches(problem, tensors, processors(tensors.q.device))


def _without_keys(problem: AttentionProblem, tensors: Tensors, addresses: list[int]) -> Result:
    q, sinks = tensors.q, tensors.sinks
    out = empty_like(q, problem.out_shape).zero_()
    lse = empty_like(q, problem.lse_shape, dtype=torch.float32).fill_(-math.inf)
    if sinks is not None:
        lse.copy_(sinks if problem.layout == "varlen" else sinks[:, None])
    # Without a key, whatever they are: there is no weight to compute again.
    return out, lse, empty_like(q, problem.statistics_shape, dtype=torch.float32).fill_(1.0)


def _fit_keys(k: Tensor, v: Tensor, share_rows: bool) -> tuple[Tensor, Tensor]:
    """k and v to fit; where they share it, with one number of rows from a batch to the next."""
    k, v = fit(k), fit(v)
    if not share_rows or k.shape[0] == 1:
        return k, v
    steps = {x.stride(0) / x.stride(2) if x.shape[2] > 1 else 0.5 for x in (k, v)}
    if len(steps) == 1 and steps.pop().is_integer():
        return k, v
    return copy(k), copy(v)
