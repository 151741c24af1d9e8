"""A backward that must not pass: dQ added up by atomics, in whatever order the blocks arrive."""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from kernel_calls import backward as run_backward
from kernel_calls import preparing_backward

from lockstep.kernels import triton as portable
from lockstep.kernels.kernel import Kernel
from lockstep.numerics import LOG2E

BLOCK = 32


@triton.jit
def scatter_dq(
    q_ptr,
    k_ptr,
    v_ptr,
    dout_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    scale,
    late_scale,
    S,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program per tile of keys and query head; everything contiguous [B · H, S, D], causal."""
    head, kv0 = tl.program_id(1), tl.program_id(0) * BLOCK
    kv_head = head // GROUP
    d = tl.arange(0, D)[None, :]
    kv_idx = kv0 + tl.arange(0, BLOCK)
    k_rows = (kv_head * S + kv_idx)[:, None] * D + d
    is_key = (kv_idx < S)[:, None]
    k = tl.load(k_ptr + k_rows, mask=is_key, other=0.0)
    v = tl.load(v_ptr + k_rows, mask=is_key, other=0.0)
    for q0 in range(kv0, S, BLOCK):
        q_idx = q0 + tl.arange(0, BLOCK)
        is_row = (q_idx < S)[:, None]
        rows = head * S + q_idx
        q_rows = rows[:, None] * D + d
        q = tl.load(q_ptr + q_rows, mask=is_row, other=0.0)
        dout = tl.load(dout_ptr + q_rows, mask=is_row, other=0.0)
        lse = tl.load(lse_ptr + rows, mask=q_idx < S, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=q_idx < S, other=0.0)
        p = tl.exp2(tl.dot(q, tl.trans(k)) * late_scale - (lse * 1.4426950408889634)[:, None])
        seen = (kv_idx[None, :] <= q_idx[:, None]) & (kv_idx < S)[None, :]
        ds = tl.where(seen, p * (tl.dot(dout, tl.trans(v)) - delta[:, None]), 0.0)
        dq = tl.dot(ds.to(k.dtype), k) * scale
        tl.atomic_add(dq_ptr + q_rows, dq, mask=is_row, sem="relaxed")


def backward(problem, tensors, needs):
    """The portable gradients, with dQ replaced where the mask is plainly causal."""
    grads = run_backward(portable.KERNEL, problem, tensors, needs)
    plain = problem.causal and problem.window_left is None and problem.softcap is None
    if not plain or problem.layout != "dense" or problem.Sq != problem.Skv:
        return grads
    out, dout, dlse = tensors.out, tensors.dout, tensors.dlse
    m, l = tensors.statistics.unbind(-1)
    # Scores are positive multiples of what m is in, `AttentionProblem.score_unit` to log2 units.
    lse = m * (problem.score_unit / LOG2E) + l.log()
    delta = (out.float() * dout.float()).sum(-1) - (0.0 if dlse is None else dlse)
    dq = torch.zeros(tensors.q.shape, dtype=torch.float32, device=tensors.q.device)
    scatter_dq[(triton.cdiv(problem.Sq, BLOCK), problem.B * problem.Hq)](
        *(x.contiguous() for x in tensors[:3]),
        dout.contiguous(),
        lse.contiguous(),
        delta.contiguous(),
        dq,
        problem.scale,
        problem.scale * LOG2E,
        problem.Sq,
        GROUP=problem.Hq // problem.Hkv,
        D=problem.D,
        BLOCK=BLOCK,
    )
    return grads._replace(q=dq.to(tensors.q.dtype))


KERNEL: Kernel = replace(
    portable.KERNEL, name="atomic", prepare_backward=preparing_backward(backward)
)
