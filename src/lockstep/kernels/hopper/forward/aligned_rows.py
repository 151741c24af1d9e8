"""Keys and values whose rows begin between the sectors of L2, copied to rows that do not.

The copy engine reads sectors of 32 bytes, and rows of 72 columns have 144 bytes: every other row
begins in the middle of a sector, and so do all rows of every other head where tokens lie first.
Loads of such rows take longer than their products do. So keys that many queries see are copied
first, to rows of a multiple of 16 columns: `align_rows_kernel`, before the forward.
"""

from __future__ import annotations

import torch

from lockstep.kernels.hopper.common.copy_engine import ALIGNMENT
from lockstep.kernels.hopper.common.gluon_shim import gl, gluon
from lockstep.kernels.launch import Buffer, Launch, unspecialized
from lockstep.problem import AttentionProblem, Tensors

SECTOR = 16  # columns
ROWS_OF_PROGRAM, WARPS = 64, 4
# A copy takes less time than it saves where keys are seen by so many queries, of all heads that
# share them.
MANY_QUERIES = 4096
# Head dims whose tiles come in chunks of 32 columns then are above the one, and up to the other.
NARROWEST, WIDEST = 64, 96
NAMES = {"k": "aligned_k", "v": "aligned_v"}


@unspecialized(gluon.jit)
def align_rows_kernel(
    x_ptr,  # [B, H, S, D], strides in steps of ALIGNMENT elements
    y_ptr,  # contiguous [B, H, S, WIDTH]
    stride_b,
    stride_h,
    stride_s,
    H,
    S,
    n_rows,
    D: gl.constexpr,
    WIDTH: gl.constexpr,
    COLUMNS: gl.constexpr,  # a power of two
    ROWS: gl.constexpr,
    STEP: gl.constexpr,
):
    LANES: gl.constexpr = COLUMNS // STEP
    layout: gl.constexpr = gl.BlockedLayout(
        [1, STEP], [32 // LANES, LANES], [gl.num_warps(), 1], [1, 0]
    )
    row = gl.program_id(0) * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    head = row // S
    at = (head // H).to(gl.int64) * stride_b + (head % H).to(gl.int64) * stride_h
    at = (at + (row % S).to(gl.int64) * stride_s) * STEP
    mask = gl.expand_dims(row < n_rows, 1) & (column < D)
    x = gl.load(x_ptr + gl.expand_dims(at, 1) + column, mask=mask)
    gl.store(y_ptr + gl.expand_dims(row.to(gl.int64) * WIDTH, 1) + column, x, mask=mask)


def aligns(problem: AttentionProblem, dim: int) -> bool:
    """Whether keys, or values, of so many columns are copied to rows that begin with a sector.
    Other head dims, layouts and builds have not been measured."""
    left, right = problem.window
    is_dense = problem.layout == "dense" and not (problem.has_kv_lens or problem.is_paged)
    is_default = not (problem.constant_time or problem.query_invariant)
    if not (is_dense and is_default) or left is not None or max(problem.D, problem.Dv) > WIDEST:
        return False
    queries = problem.Sq * (problem.Hq // problem.Hkv)
    # Under a causal mask half of the keys are seen.
    seen = queries if right is None else queries // 2
    return dim > NARROWEST and dim % SECTOR != 0 and seen >= MANY_QUERIES


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A tensor without memory, of the shape of x and with the strides of its aligned copy."""
    width = -(-x.shape[-1] // SECTOR) * SECTOR
    return torch.empty(*x.shape[:-1], width, dtype=x.dtype, device="meta")[..., : x.shape[-1]]


def align_launches(
    problem: AttentionProblem, fitted: Tensors
) -> tuple[Tensors, dict[str, Buffer], list[Launch]]:
    """`fitted` with keys and values as they lie once aligned, the memory of these, and the launches
    that align them: of none, where it does not pay."""
    changed: dict[str, torch.Tensor] = {}
    buffers: dict[str, Buffer] = {}
    launches: list[Launch] = []
    for name, x in (("k", fitted.k), ("v", fitted.v)):
        if not aligns(problem, x.shape[-1]):
            continue
        y = changed[name] = aligned(x)
        width = y.stride(-2)
        buffers[NAMES[name]] = Buffer((*x.shape[:-1], width), problem.dtype)
        launches.append(_launch(name, x, width))
    return fitted._replace(**changed), buffers, launches


def _launch(name: str, x: torch.Tensor, width: int) -> Launch:
    """The launch of `align_rows_kernel`."""
    B, H, S, D = x.shape
    stride_b, stride_h, stride_s = (stride // ALIGNMENT for stride in x.stride()[:3])
    return Launch(
        align_rows_kernel,
        (-(-B * H * S // ROWS_OF_PROGRAM),),
        {
            "stride_b": stride_b,
            "stride_h": stride_h,
            "stride_s": stride_s,
            "H": H,
            "S": S,
            "n_rows": B * H * S,
            "D": D,
            "WIDTH": width,
            "COLUMNS": 1 << (D - 1).bit_length(),
            "ROWS": ROWS_OF_PROGRAM,
            "STEP": ALIGNMENT,
        },
        names={"x": name, "y": NAMES[name]},
        num_warps=WARPS,
    )
