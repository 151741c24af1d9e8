"""Gradients on Hopper GPUs: five matrix products per pair of tiles, one order for every sum.

    backward_rows     lse2 and delta of each row; dQ from its sums    one short launch each
    backward_kernel   dK, dV and the sums of dQ                       where the time goes
    backward_walk     which keys and queries a program works on
    backward_tiles    what its warps share
    backward_turns    the order in which programs add to dQ
    backward_strays   what is not finite, and who does not see it

dQ of a row adds up key tiles in descending order; dK and dV of a key add up query heads and query
tiles in ascending order. Tiles start at multiples of their size, counted in the own sequence. So
no bit depends on the batch, on the GPU or on how a launch happens to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.hopper import MAX_HEAD_DIM
from lockstep.kernels.hopper.backward_kernel import backward_kernel
from lockstep.kernels.hopper.backward_rows import finish_queries, prepare_rows
from lockstep.kernels.hopper.copy_engine import (
    ALIGNMENT,
    batch_rows,
    copy,
    fit,
    flat_map,
    strides_of,
    tensor_map,
)
from lockstep.kernels.hopper.gluon_shim import JOINS_CHUNKS, TensorDescriptor
from lockstep.kernels.kernel import Gradients, Needs
from lockstep.numerics import LOG2E
from lockstep.problem import AttentionProblem, Tensors

BLOCK_KV = 128
# By padded head dim: what leaves room for dK and dV, or for the scores, in 240 registers.
BLOCK_Q = {64: 128, 128: 64}
# Registers of a thread when a program starts; its partitions then share them out anew.
OPTIONS = {"num_warps": 4, "maxnreg": 168}
# Where all walks begin at the first query tile, programs of one head follow each other a step
# apart. Tickets go round so many heads that these programs make no more than this many.
KEY_TILES_AT_ONCE = 128
# Beyond any length; two of them fit into int32.
FAR = 1 << 29

_compiled: dict[tuple[Any, ...], Any] = {}


def supports_backward(problem: AttentionProblem) -> str | None:
    """Why the backward refuses a problem that the forward may take."""
    if problem.layout == "paged":
        return "has no backward through pages"
    if problem.bias_shape is not None:
        return "has no backward through a bias"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"takes float16 and bfloat16, got {str(problem.dtype).removeprefix('torch.')}"
    if max(problem.D, problem.Dv) > MAX_HEAD_DIM:
        return f"has a backward for D and Dv up to 256, got {problem.D} and {problem.Dv}"
    if max(problem.D, problem.Dv) > max(BLOCK_Q) and not JOINS_CHUNKS:
        return (
            f"has a backward for D and Dv above {max(BLOCK_Q)} with Triton 3.6 and 3.7, this is "
            f"{triton.__version__}"
        )
    if problem.D % 8 or problem.Dv % 8:
        return f"takes D and Dv that are multiples of 8, got {problem.D} and {problem.Dv}"
    if 0 in (problem.B, problem.Sq, problem.Skv):
        return "takes at least one query and one key"
    return None


@dataclass(frozen=True)
class Cut:
    """How a problem is cut into tiles. A slot is a place for a tile of one head; packed sequences
    may own one too many each (`find_sequence`)."""

    block_d: int
    block_q: int
    q_slots: int
    kv_slots: int
    sequences: int  # that have heads and slots of their own: all of them, or 1 if packed
    Hq: int
    Hkv: int

    @property
    def n_tiles(self) -> int:
        """Slots for queries of all heads."""
        return self.q_slots * self.sequences * self.Hq

    @property
    def programs(self) -> int:
        return self.kv_slots * self.sequences * self.Hkv


def cut_of(problem: AttentionProblem) -> Cut:
    block_d = 64 if max(problem.D, problem.Dv) <= 64 else 128
    block_q = BLOCK_Q[block_d]
    if problem.layout == "varlen":
        q_slots, kv_slots = problem.Sq // block_q + problem.B, problem.Skv // BLOCK_KV + problem.B
        sequences = 1
    else:
        q_slots, kv_slots = triton.cdiv(problem.Sq, block_q), triton.cdiv(problem.Skv, BLOCK_KV)
        sequences = problem.B
    return Cut(block_d, block_q, q_slots, kv_slots, sequences, problem.Hq, problem.Hkv)


@dataclass(frozen=True)
class Workspace:
    """What the launches leave for each other; `backward_rows` says how."""

    stats: Tensor  # [n_tiles, 2, block_q] fp32
    sums: Tensor  # [32 * n_tiles, 256] fp32
    turn: Tensor  # [n_tiles] int32
    ticket: Tensor  # [1] int32

    @staticmethod
    def of(cut: Cut, device: torch.device) -> Workspace:
        stats = torch.empty((cut.n_tiles, 2, cut.block_q), dtype=torch.float32, device=device)
        sums = torch.empty((cut.n_tiles * 32, 256), dtype=torch.float32, device=device)
        counts = torch.empty(cut.n_tiles + 1, dtype=torch.int32, device=device)
        return Workspace(stats, sums, counts[:-1], counts[-1:])


def backward(
    problem: AttentionProblem,
    tensors: Tensors,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    needs: Needs,
) -> Gradients:
    """As `lockstep.kernels.kernel.Kernel.backward` says."""
    q, k, v, dout = (fit(x) for x in (*tensors[:3], dout))
    if tensors.kv_lens is not None and (not batch_rows(k) or batch_rows(k) != batch_rows(v)):
        k, v = copy(k), copy(v)
    tensors = tensors._replace(q=q, k=k, v=v)
    cut = cut_of(problem)
    work = Workspace.of(cut, q.device)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    sizes = (problem.Hq, problem.B, problem.Sq, problem.Skv, cut.q_slots)
    packed = problem.layout == "varlen"
    row_strides = (0, 1, problem.Hq) if packed else (problem.Hq * problem.Sq, problem.Sq, 1)

    dout_strides = (stride // ALIGNMENT for stride in strides_of(dout, packed))

    launch(
        prepare_rows,
        (cut.n_tiles, 1, 1),
        (
            *(out, dout, lse, dlse, work.stats, work.turn, work.ticket),
            *(tensors.cu_seqlens_q, tensors.cu_seqlens_k, *dout_strides, *row_strides, *sizes),
        ),
        {"ALIGN": ALIGNMENT, "DV": problem.Dv, "BLOCK_D": cut.block_d, "BLOCK_Q": cut.block_q},
    )
    arguments, constants = kernel_arguments(problem, tensors, dout, dk, dv, cut, work)
    launch(backward_kernel, (cut.programs, 1, 1), arguments, constants, **OPTIONS)
    if needs.q:
        launch(
            finish_queries,
            (cut.n_tiles, 2, 1),
            (
                *(work.sums, dq, tensors.cu_seqlens_q, tensors.cu_seqlens_k, tensors.kv_lens),
                *(*row_strides, *sizes, *reach(problem), problem.scale),
            ),
            {"D": problem.D, "BLOCK_Q": cut.block_q, "BLOCK_KV": BLOCK_KV, **masks(problem)},
        )
    return Gradients(
        q=dq if needs.q else None,
        k=dk if needs.k else None,
        v=dv if needs.v else None,
        bias=None,
        sinks=sink_gradient(tensors.sinks, work.stats, cut) if needs.sinks else None,
    )


def launch(
    kernel: Any, grid: tuple[int, int, int], arguments: tuple[Any, ...], constants: dict[str, Any],
    **options: int,
) -> None:  # fmt: skip
    """Run a kernel whose parameters are `arguments`, then `constants`, in this order. All but the
    first such run skip Triton's look at every argument: it would find the same."""
    device = arguments[0].device if isinstance(arguments[0], Tensor) else arguments[0].base.device
    traits = (_traits(x) for x in arguments if type(x) not in (int, float))
    key = (kernel, device, *constants.values(), *traits)
    with torch.cuda.device(device):
        compiled = _compiled.get(key)
        if compiled is None:
            _compiled[key] = kernel[grid](*arguments, **constants, **options)
        else:
            compiled[grid](*arguments, *constants.values())


def _traits(argument: Tensor | TensorDescriptor | None) -> tuple[Any, ...] | None:
    """What of an argument a compiled kernel depends on; on numbers it does not."""
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    return argument.base.dtype, *argument.block_shape


def kernel_arguments(
    problem: AttentionProblem,
    tensors: Tensors,
    dout: Tensor,
    dk: Tensor,
    dv: Tensor,
    cut: Cut,
    work: Workspace,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments and compile-time constants of `backward_kernel`."""
    packed, kv_lens = problem.layout == "varlen", tensors.kv_lens
    ragged_kv = packed or kv_lens is not None
    query_block = [1, 1, 1, cut.block_q, cut.block_d]
    key_block = [1, 1, 1, BLOCK_KV, cut.block_d]
    n_heads = cut.sequences * problem.Hkv
    at_once = 1
    if problem.window[1] is None:
        at_once = min(n_heads, max(1, KEY_TILES_AT_ONCE // cut.kv_slots))
    arguments = (
        tensor_map(tensors.q, query_block, packed, packed),
        tensor_map(dout, query_block, packed, packed),
        flat_map(work.stats.view(-1), [2 * cut.block_q]),
        tensor_map(tensors.k, key_block, packed, ragged_kv),
        tensor_map(tensors.v, key_block, packed, ragged_kv),
        tensor_map(dk, key_block, packed, packed),
        tensor_map(dv, key_block, packed, packed),
        flat_map(work.sums, [32, 256]),
        *(work.turn, work.ticket, tensors.cu_seqlens_q, tensors.cu_seqlens_k, kv_lens),
        *(problem.scale, problem.scale * LOG2E, (problem.softcap or 0.0) * LOG2E),
        *(cut.kv_slots, cut.q_slots, n_heads, at_once, problem.Hkv, problem.Hq // problem.Hkv),
        *(problem.B, problem.Sq, problem.Skv, *reach(problem)),
        0 if kv_lens is None else batch_rows(tensors.k),
    )
    constants = {
        "LAYOUT": "varlen" if packed else "dense" if kv_lens is None else "kv_lens",
        **masks(problem),
        "HAS_EDGE": ragged_kv or problem.Skv % BLOCK_KV != 0,
        "CAPPED": problem.softcap is not None,
        "HIDES_SCORES": problem.softcap is None and problem.scale > 0,
    }
    return arguments, constants


def reach(problem: AttentionProblem) -> tuple[int, int]:
    """Keys seen left and right of the diagonal."""
    left, right = (FAR if side is None else min(side, FAR) for side in problem.window)
    return left, right


def masks(problem: AttentionProblem) -> dict[str, bool]:
    left, right = problem.window
    return {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}


def sink_gradient(sinks: Tensor | None, stats: Tensor, cut: Cut) -> Tensor:
    """dsink = -Σ_rows exp(sink - lse) · delta [Hq], summed in fp64."""
    assert sinks is not None
    lse2, delta = stats.view(cut.sequences, cut.Hq, cut.q_slots, 2, cut.block_q).unbind(3)
    weight = torch.exp2(sinks.float().view(1, cut.Hq, 1, 1) * LOG2E - lse2)
    # A sink of -inf is none, whatever a row holds.
    weight = weight.masked_fill(sinks.view(1, cut.Hq, 1, 1) == -torch.inf, 0.0)
    return -(weight * delta).sum((0, 2, 3), dtype=torch.float64).to(sinks.dtype)
