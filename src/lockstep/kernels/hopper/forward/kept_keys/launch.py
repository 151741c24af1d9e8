"""The launch of the kernel for two blocks of keys."""

from __future__ import annotations

import torch
from torch import Tensor

from lockstep.kernels.hopper.common.sizes import ROWS, columns
from lockstep.kernels.hopper.forward.kept_keys.kernel import kept_keys_kernel
from lockstep.kernels.hopper.forward.kept_keys.plan import (
    MAPS,
    REGISTERS,
    Sizes,
    shares_of,
    width_of,
)
from lockstep.kernels.hopper.forward.plan import value_columns
from lockstep.kernels.hopper.forward.shapes import Shape, row_strides, scales, tiles_of
from lockstep.kernels.launch import Launch
from lockstep.kernels.window import limit_of
from lockstep.problem import AttentionProblem, Tensors


def kept_keys_launch(
    problem: AttentionProblem, sizes: Sizes, q: Tensor, fitted: Tensors, n_processors: int
) -> Launch:
    """The launch of `kept_keys_kernel`; results lie as q does, of which `fitted` may have a
    copy."""
    n_q_tiles = sizes.tiles_of_heads(problem)
    n_tiles = problem.B * (problem.Hq // sizes.heads) * n_q_tiles
    programs = min(n_tiles, n_processors * sizes.programs)
    scores, scale, _ = scales(problem)
    numbers = {
        **row_strides(problem, q),
        **shares_of(problem, sizes, programs)._asdict(),
        "n_q_tiles": n_q_tiles,
        "Hq": problem.Hq,
        "heads_per_kv": problem.Hq // problem.Hkv,
        "Sq": problem.Sq,
        "Skv": problem.Skv,
        "right": limit_of(problem.window[1]),
        "scale": scale,
    }
    constants = {
        "HAS_RIGHT": problem.window[1] is not None,
        "SCORES": scores,
        "HAS_SINKS": problem.has_sinks,
        "HEADS": sizes.heads,
        "D_COLUMNS": columns(problem.D),
        "DV_COLUMNS": value_columns(problem.Dv),
        "DV": problem.Dv,
        "REST": sizes.rest,
        "FIXED_MAX": problem.dtype == torch.bfloat16,
    }
    names = {"k_rest": "k", "v_rest": "v"} | ({} if problem.has_sinks else {"sinks": "lse"})
    # Where there is no rest, any map may stand for it.
    rest = sizes.rest or sizes.block
    width, width_v = MAPS[width_of(problem.D)], MAPS[width_of(problem.Dv)]
    return Launch(
        kept_keys_kernel,
        (programs,),
        numbers | constants,
        maps={
            "q": _tiles_of_heads(fitted.q, sizes.heads, width).describe,
            "k": tiles_of(fitted.k, sizes.block, width, False).describe,
            "k_rest": tiles_of(fitted.k, rest, width, False).describe,
            "v": tiles_of(fitted.v, sizes.block, width_v, False).describe,
            "v_rest": tiles_of(fitted.v, rest, width_v, False).describe,
        },
        names=names,
        num_warps=4,
        maxnreg=REGISTERS[sizes.programs],
    )


def _tiles_of_heads(q: Tensor, heads: int, width: int) -> Shape:
    """The tensor map of q [B, H, S, D] in tiles of so many heads."""
    rows = ROWS // heads
    return tiles_of(q, rows, width, False)._replace(block=[1, 1, heads, rows, width])
