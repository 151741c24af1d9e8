"""From a problem to a launch: everything but the pointers is worked out once and kept."""

from __future__ import annotations

import math
import secrets
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.hopper.common.copy_engine import ALIGNMENT, copy, fit, strides_of
from lockstep.kernels.hopper.common.gluon_shim import TensorDescriptor, gl
from lockstep.kernels.hopper.common.sizes import ROWS, processors
from lockstep.kernels.hopper.decode.folding.fold import fold_slots
from lockstep.kernels.hopper.decode.folding.fold_plan import MOST_SLOTS, fold_plan, fold_programs
from lockstep.kernels.hopper.decode.kernel import decode_kernel
from lockstep.kernels.hopper.decode.plan import (
    COLUMNS,
    COUNT_BITS,
    INVARIANT_PART_NUMBERS,
    MARK_BITS,
    NARROW_ROWS,
    PART_NUMBERS,
    PRODUCER_REGISTERS,
    columns_of,
    few_rows,
    folds_inside,
    is_narrow,
    keeps_whole,
    keys_per_row,
    least_of_short,
    least_span,
    most_of_tall,
    most_spans,
    narrow_rows,
    plan_of,
    prefetches,
    programs_of,
    query_order,
    query_tiles_of,
    room_of,
    spans_wanted,
    starts_late,
    team_of,
    tile_rows_of,
)
from lockstep.kernels.hopper.decode.spans.fold import fold_spans
from lockstep.kernels.hopper.decode.tiles import FIELDS, list_tiles
from lockstep.kernels.hopper.forward.ragged_pages import (
    LongSequences,
    has_long_sequences,
    long_sequences,
)
from lockstep.kernels.kernel import Prepared, Result
from lockstep.kernels.launch import Buffer, Launch, Launches
from lockstep.kernels.window import limit_of
from lockstep.memory_order import strides_like
from lockstep.problem import AttentionProblem, Tensors

# Of counters that this process uses (`folding/arrivals.py`), with its highest bit set: of one type.
MARK = 1 << MARK_BITS | secrets.randbits(MARK_BITS)


def decode_launches(problem: AttentionProblem, tensors: Tensors, n_processors: int) -> Launches:
    """The launches that run one problem with inputs of given strides and alignment."""
    fitted = tensors._replace(q=fit(tensors.q), k=fit(tensors.k), v=fit(tensors.v))
    lengths = None
    if tensors.kv_lens is None:
        lengths = torch.full((problem.B,), problem.Skv, dtype=torch.int32, device=tensors.q.device)
    copied = [
        name for name, x, y in zip(Tensors._fields, tensors, fitted, strict=True) if x is not y
    ]
    n_programs = programs_of(problem, n_processors)
    n_rows, n_spans = tile_rows_of(problem), most_spans(problem)
    n_slots = min(n_programs, room_of(problem) * problem.Hkv)
    assert n_slots <= MOST_SLOTS, f"{n_slots} slots: `folding/units.py` looks at {MOST_SLOTS}"
    n_numbers = INVARIANT_PART_NUMBERS if problem.query_invariant else PART_NUMBERS
    # A pointer that is not used may be any.
    unused = {"sinks": not problem.has_sinks, "statistics": problem.is_paged}
    unused |= {"page_table": not problem.is_paged, "kv_starts": not problem.has_kv_starts}
    names = {name: "lse" for name, is_unused in unused.items() if is_unused}
    if lengths is not None:
        names["kv_lens"] = "lengths"
    shared = _numbers(problem, tensors.q, fitted, n_programs) | _constants(problem)
    shared["n_slots"] = n_slots
    inside = folds_inside(problem, n_programs)
    shared["INSIDE"] = inside
    is_folded = inside or n_spans == 1
    assert n_spans < 1 << COUNT_BITS
    decode = Launch(
        decode_kernel,
        (n_programs,),
        {name: shared[name] for name in _taken_by(decode_kernel)},
        maps={
            "k": partial(_describe, problem.page_size, plan_of(problem).block_kv, "nan"),
            "v": partial(_describe, problem.page_size, plan_of(problem).block_kv, "zero"),
        },
        names=names | ({"kv_lens": "tiles"} if problem.is_packed else {}),
        num_warps=4,
        maxnreg=plan_of(problem).registers,
        launch_pdl=True,
    )
    long = None
    if has_long_sequences(problem):
        long = long_sequences(problem, tensors.q, fitted, n_processors)
    folds = fold_plan(problem, n_slots, n_processors)
    shared |= {"ROWS": folds.rows, "COLUMNS": folds.columns}
    shared |= {"BATCH": folds.batch, "BATCHES": folds.batches}
    fold_kernel = fold_spans if problem.query_invariant else fold_slots
    fold = Launch(
        fold_kernel,
        (fold_programs(problem, folds, n_slots, n_processors),),
        {name: shared[name] for name in _taken_by(fold_kernel)},
        names=_renamed(fold_kernel, names | ({} if problem.is_packed else {"tiles": "slots"})),
        num_warps=folds.warps,
        launch_pdl=True,
    )
    parts = {
        "parts": Buffer((n_slots, n_spans, n_rows, columns_of(problem.Dv)), torch.float32),
        "part_stats": Buffer((n_slots, n_spans, n_rows, n_numbers), torch.float32),
        "arrivals": Buffer((n_slots,), torch.int64),
    }
    # Neither kernel has anything to do then.
    has_none = long is not None and long.are_all
    statistics = Buffer.like(tensors.q, problem.statistics_shape, torch.float32)
    return Launches(
        tensors.q.device,
        Tensors._fields,
        {
            "out": Buffer.like(tensors.q, problem.out_shape, problem.dtype),
            "lse": Buffer.like(tensors.q, problem.lse_shape, torch.float32),
            **({} if problem.is_paged else {"statistics": statistics}),
        },
        {
            **({} if has_none else parts),
            "slots": Buffer((n_slots, 3), torch.int32),
            "tiles": _tiles(problem),
            **({} if long is None else long.memory),
        },
        [
            *_listing(problem, names, n_slots, long),
            *([] if has_none else [decode]),
            # The forward has room on SMs that are done with decode before others, if the second
            # kernel does not wait there.
            *([] if long is None else long.launches),
            *([] if is_folded or has_none else [fold]),
        ],
        kept={} if lengths is None else {"lengths": lengths},
        fit=partial(_fit, copied) if copied else None,
        finish=_finish,
    )


def _tiles(problem: AttentionProblem) -> Buffer | None:
    """Memory for the table of tiles of packed queries."""
    return Buffer((1 + room_of(problem), FIELDS), torch.int32) if problem.is_packed else None


def _listing(
    problem: AttentionProblem, names: dict[str, str], n_slots: int, long: LongSequences | None
) -> list[Launch]:
    """The launch that writes that table, and puts long sequences in order."""
    if not problem.is_packed:
        return []
    sizes = {name: getattr(problem, name) for name in ("B", "Sq", "Skv", "Hkv", "Dv")}
    sizes |= {"n_slots": n_slots}
    sizes |= {"GROUP": problem.Hq // problem.Hkv, "ROWS": ROWS, "EARLY": True}
    sizes |= {"KEYS_PER_ROW": keys_per_row(problem), "SORTS": long is not None}
    names = _renamed(list_tiles, names)
    if long is None:
        # No sequence has as many queries, or one that does is refused, and there is no order.
        sizes |= {"least_queries": problem.longest_q + 1, "longest": problem.longest_q}
        sizes |= {"block_q": ROWS, "Hq": problem.Hq}
        sizes |= {"n_arrivals": 0, "most_parts": 1, "diagonal": 0}
        sizes |= {"group": 1, "whole_group": 1, "few_queries": 0, "CUTS": False}
        names |= dict.fromkeys(("sequence_order", "cut_order", "tile_arrivals"), "slots")
    else:
        sizes |= long.sorting
        if not sizes["CUTS"]:
            names |= dict.fromkeys(("cut_order", "tile_arrivals"), "slots")
    return [Launch(list_tiles, (problem.B + 1,), sizes, names=names, num_warps=1)]


def _renamed(kernel: Any, names: dict[str, str]) -> dict[str, str]:
    """The `names` that are pointers of a kernel."""
    return {name: to for name, to in names.items() if f"{name}_ptr" in kernel.arg_names}


def _taken_by(kernel: Any) -> list[str]:
    return [name for name in kernel.arg_names if not name.endswith(("_ptr", "_desc"))]


def _fit(names: list[str], tensors: Tensors) -> Tensors:
    """Tensors with copies of some of them."""
    return tensors._replace(**{name: copy(getattr(tensors, name)) for name in names})


def _finish(tensors: Tensors, results: list[Tensor], workspace: Any) -> Result:
    out, lse, *statistics = results
    return out, lse, statistics[0] if statistics else None


def _describe(page_size: int | None, block_kv: int, padding: str, x: Tensor) -> TensorDescriptor:
    """A tensor map of pages x [n_pages, page, Hkv, D] as [n_pages, Hkv, page, D], or of x
    [B, Hkv, Skv, D] as it is."""
    if page_size is None:
        x, page_size = x.transpose(1, 2), block_kv
    n_pages, page, H, D = x.shape
    # The stride of a dim of size 1 means nothing and may be anything.
    by_page, by_row, by_head = (
        stride if size > 1 else ALIGNMENT
        for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    )
    block = [1, 1, math.gcd(page_size, block_kv), COLUMNS]
    layout = gl.NVMMASharedLayout(128, 16, 4)
    shape, strides = [n_pages, H, page, D], [by_page, by_head, by_row, 1]
    return TensorDescriptor(x, shape, strides, block, layout, padding)


def _numbers(
    problem: AttentionProblem, q: Tensor, fitted: Tensors, n_programs: int
) -> dict[str, float]:
    """Results lie as q does, of which `fitted` may have a copy."""
    k, v = (x if problem.is_paged else x.transpose(1, 2) for x in (fitted.k, fitted.v))
    left, right = problem.window
    cap = problem.softcap
    by_batch, by_head, by_row = strides_of(fitted.q, problem.is_packed)
    # Rows of out and lse from one sequence, head and query to the next.
    rows = (0, 1, problem.Hq) if problem.is_packed else strides_like(q, problem.lse_shape)
    return {
        "stride_qb": by_batch,
        "stride_qh": by_head,
        "stride_qs": by_row,
        "rows_b": rows[0],
        "rows_h": rows[1],
        "rows_s": rows[2],
        "stride_kp": k.stride(0),
        "stride_ks": k.stride(1),
        "stride_kh": k.stride(2),
        "stride_vp": v.stride(0),
        "stride_vs": v.stride(1),
        "stride_vh": v.stride(2),
        "stride_tb": 0 if fitted.page_table is None else fitted.page_table.stride(0),
        "B": room_of(problem),
        "group": problem.Hq // problem.Hkv,
        "heads": problem.Hkv,
        "q_tiles": query_tiles_of(problem),
        "Sq": problem.Sq,
        "Skv": problem.Skv,
        "n_pages": v.shape[0],
        "page_size": problem.page_size or 0,
        "left": limit_of(left),
        "right": limit_of(right),
        "wanted": spans_wanted(problem),
        "least": least_span(problem),
        "least_of_short": least_of_short(problem),
        "most_of_tall": most_of_tall(problem),
        "team": team_of(problem, n_programs),
        "waves": plan_of(problem).programs,
        "whole": int(keeps_whole(problem)),
        "n_spans": most_spans(problem),
        "n_rows": tile_rows_of(problem),
        "cap_scale": 0.0 if cap is None else problem.scale / cap,
        "score_scale": problem.scale if cap is None else cap,
        "unit": problem.score_unit,
        "natural": problem.scale if problem.has_raw_scores else 1.0,
        "mark": MARK,
    }


def _constants(problem: AttentionProblem) -> dict[str, Any]:
    sizes = plan_of(problem)
    scores = "raw" if problem.has_raw_scores else "scaled"
    return {
        "D": columns_of(problem.D),
        "DV": columns_of(problem.Dv),
        "HEAD_DIM": problem.D,
        "HEAD_DIM_V": problem.Dv,
        "HAS_LEFT": problem.window[0] is not None,
        "HAS_RIGHT": problem.window[1] is not None,
        "HAS_SINKS": problem.has_sinks,
        "PACKED": problem.is_packed,
        "SCORES": "capped" if problem.softcap is not None else scores,
        "BLOCK_KV": sizes.block_kv,
        "STAGES": sizes.stages,
        "PREFETCH": prefetches(problem),
        "PRODUCER_REGISTERS": PRODUCER_REGISTERS[sizes.registers],
        "HAS_STARTS": problem.has_kv_starts,
        "WHOLE_PAGES": problem.is_paged and sizes.block_kv % problem.page_size == 0,
        "PAGED": problem.is_paged,
        "QUERY_INVARIANT": problem.query_invariant,
        "FIXED_MAX": problem.dtype == torch.bfloat16,
        "FEW": few_rows(problem),
        "NARROW": narrow_rows(problem),
        "LATE": starts_late(problem),
        "Q_ROWS": NARROW_ROWS if is_narrow(problem) else ROWS,
        "Q_ORDER": query_order(problem),
    }


def prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    """`Kernel.prepare`, of a problem that `supports` lets through."""
    return decode_launches(problem, tensors, processors(tensors.q.device))
