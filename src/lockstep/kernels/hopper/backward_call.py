"""What the backwards of narrow and of wide heads have in common before and after their kernels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.kernels.hopper.backward_rows import prepare_rows
from lockstep.kernels.hopper.copy_engine import ALIGNMENT, batch_rows, copy, fit, strides_of
from lockstep.kernels.hopper.gluon_shim import TensorDescriptor
from lockstep.kernels.kernel import Gradients, Needs
from lockstep.numerics import LOG2E
from lockstep.problem import AttentionProblem, Tensors

# Beyond any length; two of them fit into int32.
FAR = 1 << 29


_compiled: dict[tuple[Any, ...], Any] = {}


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


def slots_of(problem: AttentionProblem, S: int, block: int) -> int:
    """Places for tiles of `block` rows in a head of `S` rows."""
    return S // block + problem.B if problem.layout == "varlen" else triton.cdiv(S, block)


def cut_into(problem: AttentionProblem, block_d: int, block_q: int, block_kv: int) -> Cut:
    q_slots = slots_of(problem, problem.Sq, block_q)
    kv_slots = slots_of(problem, problem.Skv, block_kv)
    sequences = 1 if problem.layout == "varlen" else problem.B
    return Cut(block_d, block_q, q_slots, kv_slots, sequences, problem.Hq, problem.Hkv)


def fit_inputs(tensors: Tensors, dout: Tensor) -> tuple[Tensors, Tensor]:
    """As the copy engine takes them; with kv_lens, k and v have as many rows to a sequence."""
    q, k, v, dout = (fit(x) for x in (*tensors[:3], dout))
    if tensors.kv_lens is not None and (not batch_rows(k) or batch_rows(k) != batch_rows(v)):
        k, v = copy(k), copy(v)
    return tensors._replace(q=q, k=k, v=v), dout


def new_gradients(tensors: Tensors) -> tuple[Tensor, ...]:
    """Memory for dq, dk and dv."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in tensors[:3])


def row_arguments(problem: AttentionProblem, cut: Cut) -> tuple[int, ...]:
    """Strides of contiguous rows, and sizes, as `backward_rows` takes them."""
    packed = problem.layout == "varlen"
    strides = (0, 1, problem.Hq) if packed else (problem.Hq * problem.Sq, problem.Sq, 1)
    return *strides, problem.Hq, problem.B, problem.Sq, problem.Skv, cut.q_slots


def prepare_statistics(
    problem: AttentionProblem,
    tensors: Tensors,
    results: tuple[Tensor, Tensor, Tensor, Tensor | None],
    stats: Tensor,
    cut: Cut,
    counters: tuple[Tensor | None, Tensor | None] = (None, None),
    **options: int,
) -> None:
    """Launch `prepare_rows`. `results` are out, lse, dout and dlse, `counters` turn and ticket."""
    out, lse, dout, dlse = results
    dout_strides = strides_of(dout, problem.layout == "varlen")
    launch(
        prepare_rows,
        (cut.n_tiles, 1, 1),
        (
            *(out, dout, lse, dlse, stats, *counters),
            *(tensors.cu_seqlens_q, tensors.cu_seqlens_k),
            *(*(stride // ALIGNMENT for stride in dout_strides), *row_arguments(problem, cut)),
        ),
        {"ALIGN": ALIGNMENT, "DV": problem.Dv, "BLOCK_D": cut.block_d, "BLOCK_Q": cut.block_q},
        **options,
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


def raggedness(problem: AttentionProblem) -> tuple[bool, bool]:
    """Whether queries, and whether keys, are clipped to those of a sequence."""
    packed = problem.layout == "varlen"
    return packed, packed or problem.has_kv_lens


def scales_of(problem: AttentionProblem) -> tuple[float, float, float]:
    return problem.scale, problem.scale * LOG2E, (problem.softcap or 0.0) * LOG2E


def sizes_of(problem: AttentionProblem, k: Tensor) -> tuple[int, ...]:
    kv_batch_rows = batch_rows(k) if problem.has_kv_lens else 0
    return problem.B, problem.Sq, problem.Skv, *reach(problem), kv_batch_rows


def constants_of(problem: AttentionProblem, block_kv: int) -> dict[str, Any]:
    """What kernels are compiled for, head dims aside."""
    packed, ragged_kv = raggedness(problem)
    return {
        "LAYOUT": "varlen" if packed else "kv_lens" if ragged_kv else "dense",
        **masks(problem),
        "HAS_EDGE": ragged_kv or problem.Skv % block_kv != 0,
        "CAPPED": problem.softcap is not None,
        "HIDES_SCORES": problem.softcap is None and problem.scale > 0,
    }


def reach(problem: AttentionProblem) -> tuple[int, int]:
    """Keys seen left and right of the diagonal."""
    left, right = (FAR if side is None else min(side, FAR) for side in problem.window)
    return left, right


def masks(problem: AttentionProblem) -> dict[str, bool]:
    left, right = problem.window
    return {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}


def wanted(
    needs: Needs, dq: Tensor, dk: Tensor, dv: Tensor, sinks: Tensor | None, stats: Tensor, cut: Cut
) -> Gradients:
    """Those that are needed."""
    return Gradients(
        q=dq if needs.q else None,
        k=dk if needs.k else None,
        v=dv if needs.v else None,
        bias=None,
        sinks=_sink_gradient(sinks, stats, cut) if needs.sinks else None,
    )


def _sink_gradient(sinks: Tensor | None, stats: Tensor, cut: Cut) -> Tensor:
    """dsink = -Σ_rows exp(sink - lse) · delta [Hq], summed in fp64."""
    assert sinks is not None
    lse2, delta = stats.view(cut.sequences, cut.Hq, cut.q_slots, 2, cut.block_q).unbind(3)
    weight = torch.exp2(sinks.float().view(1, cut.Hq, 1, 1) * LOG2E - lse2)
    # A sink of -inf is none, whatever a row holds.
    weight = weight.masked_fill(sinks.view(1, cut.Hq, 1, 1) == -torch.inf, 0.0)
    return -(weight * delta).sum((0, 2, 3), dtype=torch.float64).to(sinks.dtype)
