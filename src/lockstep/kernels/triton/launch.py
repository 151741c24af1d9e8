"""From a problem to a launch: everything but the pointers is worked out once and kept."""

from __future__ import annotations

import itertools
import math
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.kernel import Prepared, Result
from lockstep.kernels.launch import Buffer, Launch, Launches
from lockstep.kernels.triton.forward import attend
from lockstep.kernels.triton.plan import (
    INTERPRETER,
    LEAST_SPAN,
    Device,
    Plan,
    block_of,
    plan_of,
    stages_of,
)
from lockstep.kernels.triton.split_kv import reduce_parts
from lockstep.kernels.window import limit_of
from lockstep.memory_order import empty_like, is_tokens_first
from lockstep.problem import AttentionProblem, Tensors

# What `forward.attend` takes where keys come in blocks.
NO_STATE = ("state", "state_stats", "next_state", "next_state_stats")
Strides = tuple[int, int, int]
"""By sequence (or page), head and token."""


def row_strides(problem: AttentionProblem, tensors: Tensors) -> dict[str, Strides]:
    """The strides of q, k and v in any layout; 0 by sequence if sequences are packed."""
    found: dict[str, Strides] = {}
    for name, x in zip("qkv", tensors[:3], strict=True):
        if problem.is_paged and name != "q":
            by_page, by_token, by_head, _ = x.stride()
            found[name] = by_page, by_head, by_token
        elif problem.is_packed:
            found[name] = 0, x.stride(1), x.stride(0)
        else:
            found[name] = x.stride()[:3]
    return found


def result_strides(problem: AttentionProblem, q: Tensor) -> Strides:
    """The strides, in rows, of results [B, Hq, Sq], which lie as q does, or [T, Hq] if sequences
    are packed."""
    Hq, Sq = problem.Hq, problem.Sq
    if problem.is_packed:
        return 0, 1, Hq
    return (Hq * Sq, 1, Hq) if is_tokens_first(q) else (Hq * Sq, Sq, 1)


def bias_strides(bias: Tensor | None) -> dict[str, int]:
    """The strides of a bias, 0 along dims of which it has one element for all."""
    strides = (0, 0, 0, 0)
    if bias is not None:
        strides = tuple(
            0 if size == 1 else stride
            for size, stride in zip(bias.shape, bias.stride(), strict=True)
        )
    return dict(zip(("stride_bb", "stride_bh", "stride_bq", "stride_bk"), strides, strict=True))


def slope_stride(slopes: Tensor | None) -> int | None:
    """The stride from the slopes of one sequence to those of the next, 0 if all have the same. None
    without slopes: kernels are then compiled without this argument."""
    if slopes is None:
        return None
    return slopes.stride(0) if slopes.dim() == 2 else 0


def stride_arguments(strides: dict[str, Strides], unit: int = 1) -> dict[str, int]:
    """Strides as kernels name them: `stride_qb`, `stride_qh` and `stride_qs` of q, in units."""
    return {
        f"stride_{tensor}{dim}": stride // unit
        for tensor, by_dim in strides.items()
        for dim, stride in zip("bhs", by_dim, strict=True)
    }


def alignment(strides: dict[str, Strides], tensors: Tensors) -> int:
    """The largest number of elements, 16 bytes at most, that every row of q, k and v starts at."""
    size = tensors.q.element_size()
    pointers = (tensor.data_ptr() // size for tensor in tensors[:3])
    return math.gcd(16 // size, *itertools.chain(*strides.values()), *pointers)


def scales_of(problem: AttentionProblem, precision: str) -> dict[str, Any]:
    """The numbers and flags that `tiles.scores` takes."""
    cap = problem.softcap
    return {
        "cap_scale": 0.0 if cap is None else problem.scale / cap,
        "score_scale": problem.scale if cap is None else cap,
        "HAS_SOFTCAP": cap is not None,
        "PRECISION": precision,
        "RAW": problem.has_raw_scores,
        **units_of(problem),
    }


def units_of(problem: AttentionProblem) -> dict[str, float]:
    """The factors that turn scores into log2 units, and into natural ones."""
    return {
        "unit": problem.score_unit,
        "natural": problem.scale if problem.has_raw_scores else 1.0,
    }


def is_describable(
    problem: AttentionProblem, strides: dict[str, Strides], align: int, BLOCK_KV: int
) -> bool:
    """Whether a TMA descriptor can describe the rows of a head of k and v."""
    page = problem.page_size
    if page is not None and problem.has_kv_starts:
        return False
    for by_page, _, by_token in (strides["k"], strides["v"]):
        if align * problem.dtype.itemsize != 16 or by_token == 0:
            return False
        # Pages that follow one another without a gap.
        if page is not None and by_page != page * by_token:
            return False
    # Tiles that lie in one page.
    return page is None or page % BLOCK_KV == 0


def attend_arguments(problem: AttentionProblem, tensors: Tensors, plan: Plan) -> dict[str, Any]:
    """All arguments of `forward.attend` but the pointers."""
    strides = row_strides(problem, tensors)
    align = alignment(strides, tensors)
    table, tiles = tensors.page_table, plan.tiles
    return {
        **stride_arguments(strides, align),
        **bias_strides(tensors.bias),
        **stride_arguments({"r": result_strides(problem, tensors.q)}),
        "stride_tb": 0 if table is None else table.stride(0),
        "stride_ab": slope_stride(tensors.alibi_slopes),
        **window_of(problem),
        **scales_of(problem, plan.precision),
        **sizes_of(problem),
        "n_pages": problem.n_pages or 0,
        "wanted": plan.wanted,
        "n_slots": plan.n_slots,
        "n_spans": plan.n_spans,
        "run_spans": plan.run_spans,
        "D": problem.D,
        "DV": problem.Dv,
        "GROUP": problem.Hq // problem.Hkv,
        "PAGE_SIZE": problem.page_size or 0,
        "ALIGN": align,
        "TMA": plan.tma and is_describable(problem, strides, align, tiles.BLOCK_KV),
        "FOLDS": plan.n_spans > 1,
        "LEAST_SPAN": LEAST_SPAN,
        "EARLY": plan.early,
        "CONSTANT_TIME": problem.constant_time,
        "SECRET_LENGTHS": problem.secret_lengths,
        "BLOCK_Q": tiles.BLOCK_Q,
        "BLOCK_KV": tiles.BLOCK_KV,
        "BLOCK_D": plan.BLOCK_D,
        "BLOCK_DV": plan.BLOCK_DV,
    }


def options_of(problem: AttentionProblem, plan: Plan, device: Device) -> dict[str, int]:
    """The options with which `forward.attend` is compiled."""
    return plan.tiles.options | {"num_stages": stages_of(problem, plan, device.shared_bytes)}


def reduce_arguments(problem: AttentionProblem, q: Tensor, plan: Plan) -> dict[str, Any]:
    """All arguments of `split_kv.reduce_parts` but the pointers."""
    return {
        **sizes_of(problem),
        **window_of(problem),
        **units_of(problem),
        "wanted": plan.wanted,
        "n_spans": plan.n_spans,
        "GROUP": problem.Hq // problem.Hkv,
        "LEAST_SPAN": LEAST_SPAN,
        "EARLY": plan.early,
        "SECRET_LENGTHS": problem.secret_lengths,
        "TOKENS_FIRST": is_tokens_first(q),
        "DV": problem.Dv,
        "BLOCK_DV": block_of(problem.Dv),
    }


def sizes_of(problem: AttentionProblem) -> dict[str, int]:
    sizes = {size: getattr(problem, size) for size in ("B", "Hkv", "Sq", "Skv")}
    # Where there is no page, no sequence can have a key, whatever a table has room for.
    return sizes | {"Skv": 0} if problem.n_pages == 0 else sizes


def window_of(problem: AttentionProblem) -> dict[str, Any]:
    left, right = problem.window
    return {
        "left": limit_of(left),
        "right": limit_of(right),
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
    }


def forward_launches(
    problem: AttentionProblem, tensors: Tensors, plan: Plan, device: Device
) -> Launches:
    """The launches that run one problem with inputs of given strides and alignment."""
    of_lse, of_rows = problem.lse_dtype, problem.lse_shape
    has_gradient, split = problem.has_gradient, plan.n_runs > 1
    results = {
        "out": Buffer.like(tensors.q, problem.out_shape, problem.dtype),
        "lse": Buffer.like(tensors.q, of_rows, of_lse),
        "statistics": (
            Buffer.like(tensors.q, problem.statistics_shape, of_lse) if has_gradient else None
        ),
    }
    workspace = {
        "parts": Buffer((*of_rows, plan.n_spans, problem.Dv), of_lse) if split else None,
        "part_stats": Buffer((*of_rows, plan.n_spans, 2), of_lse) if split else None,
    }
    launches = [
        Launch(
            attend,
            (plan.n_programs, plan.n_runs),
            attend_arguments(problem, tensors, plan),
            # The sink of a row is folded once, when its parts are.
            absent=(*NO_STATE, "sinks") if split else NO_STATE,
            **options_of(problem, plan, device),
        )
    ]
    if split:
        options = {"num_warps": 1, **({"launch_pdl": True} if plan.early else {})}
        arguments = reduce_arguments(problem, tensors.q, plan)
        launches.append(Launch(reduce_parts, (math.prod(of_rows),), arguments, **options))
    return Launches(
        tensors.q.device,
        Tensors._fields,
        results,
        workspace,
        launches,
        finish=None if has_gradient else _without_statistics,
    )


def _without_statistics(tensors: Tensors, results: list[Tensor], workspace: Any) -> Result:
    out, lse = results
    return out, lse, None


def prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    """`Kernel.prepare`"""
    if 0 in problem.lse_shape:
        return partial(_nothing, problem)
    device = device_of(tensors.q.device)
    # The same cu_seqlens: every packed sequence has as many keys as queries.
    at = Tensors._make(tensors.addresses())
    own_keys = problem.layout == "varlen" and at.cu_seqlens_q == at.cu_seqlens_k
    return forward_launches(problem, tensors, plan_of(problem, device, own_keys), device)


def _nothing(problem: AttentionProblem, tensors: Tensors, addresses: list[int]) -> Result:
    """Results without a single row."""
    out = empty_like(tensors.q, problem.out_shape)
    of_rows = partial(empty_like, tensors.q, dtype=problem.lse_dtype)
    lse, has_gradient = of_rows(problem.lse_shape), problem.has_gradient
    return out, lse, of_rows(problem.statistics_shape) if has_gradient else None


@lru_cache(maxsize=64)
def device_of(device: torch.device) -> Device:
    if device.type != "cuda":
        return INTERPRETER
    properties = torch.cuda.get_device_properties(device)
    return Device(
        multiprocessors=properties.multi_processor_count,
        shared_bytes=properties.shared_memory_per_block_optin,
        tma=properties.major >= 9,
        tensor_memory=properties.major >= 10,
        early=properties.major >= 9,
        # Rows of 128 bytes. With shorter ones ptxas, up to CUDA 13.0, has the products of sm_90
        # read their operands from addresses that it never computed.
        least_block=64 if properties.major == 9 else 16,
    )
