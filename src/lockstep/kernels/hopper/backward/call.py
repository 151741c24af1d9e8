"""What the backwards of narrow and of wide heads have in common before and after their kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import is_
from typing import Any

import torch
import triton
from torch import Tensor

from lockstep.cache import Cache
from lockstep.kernels.allocate import allocator
from lockstep.kernels.device_call import DeviceCall
from lockstep.kernels.driver import Grid, Launcher, launcher_of
from lockstep.kernels.hopper.backward.rows import prepare_rows
from lockstep.kernels.hopper.common.copy_engine import ALIGNMENT, batch_rows, copy, fit, strides_of
from lockstep.kernels.hopper.common.gluon_shim import TensorDescriptor
from lockstep.kernels.kernel import BackwardTensors, Gradients, Needs
from lockstep.numerics import LOG2E
from lockstep.problem import AttentionProblem, Tensors

# Beyond any length; two of them fit into int32.
FAR = 1 << 29
Launched = Callable[[], Launcher]
"""Works out how to launch the same once more. Keeps tensors until then."""
# By all that a compiled kernel depends on.
_COMPILED: Cache[tuple[Any, ...], Any] = Cache(limit=1024)


@dataclass(frozen=True)
class Cut:
    """How a problem is cut into tiles. A slot is a place for a tile of one head; packed sequences
    may own one too many each, and there is one for rows that none of them owns."""

    block_d: int
    block_q: int
    q_slots: int
    kv_slots: int
    sequences: int  # that have heads and slots of their own: all of them, or 1 if packed
    Hq: int
    Hkv: int
    packed: int | None  # how many sequences are

    @property
    def n_bounds(self) -> int:
        """Numbers of `rows`, which say where packed sequences begin."""
        return 0 if self.packed is None else 3 * (self.packed + 2)

    @property
    def n_tiles(self) -> int:
        """Slots for queries of all heads."""
        return self.q_slots * self.sequences * self.Hq

    @property
    def programs(self) -> int:
        return self.kv_slots * self.sequences * self.Hkv


def slots_of(problem: AttentionProblem, S: int, block: int) -> int:
    """Places for tiles of `block` rows in a head of `S` rows."""
    return S // block + problem.B + 1 if problem.layout == "varlen" else triton.cdiv(S, block)


def cut_into(problem: AttentionProblem, block_d: int, block_q: int, block_kv: int) -> Cut:
    q_slots = slots_of(problem, problem.Sq, block_q)
    kv_slots = slots_of(problem, problem.Skv, block_kv)
    packed = problem.B if problem.layout == "varlen" else None
    sequences = problem.B if packed is None else 1
    return Cut(block_d, block_q, q_slots, kv_slots, sequences, problem.Hq, problem.Hkv, packed)


class Call(DeviceCall):
    """What derives one problem with inputs of given strides and alignment.

    The first call may compile. The second works out how to launch the same once more, which takes
    too long for calls that come once. Later ones take addresses alone."""

    def __init__(
        self, problem: AttentionProblem, given: BackwardTensors, needs: Needs, cut: Cut
    ) -> None:
        self.problem, self.needs, self.cut = problem, needs, cut
        q, k, v = given[:3]
        self.where, self.device = q.device, q.get_device()
        self.new_dq, self.new_dk, self.new_dv = (
            allocator(tuple(x.shape), x.dtype, x.device) for x in (q, k, v)
        )
        self._copies = not all(map(is_, _fit_inputs(given), given))
        self._was_called = False
        # In the order of their launches.
        self.launchers: tuple[Launcher | None, ...] | None = None

    def _run(self, given: BackwardTensors, addresses: list[int]) -> Gradients:
        if self._copies:
            # Held until the kernels are in the stream.
            given = _fit_inputs(given)
            addresses = given.addresses()
        if self.launchers is None:
            results = given.out, given.statistics, given.dout, given.dlse
            grads, launched = self.derive(given.inputs, *results)
            if self._was_called:
                self.launchers = tuple(None if x is None else x() for x in launched)
            self._was_called = True
            return grads
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        return self.again(stream, given, addresses)

    def derive(
        self, tensors: Tensors, out: Tensor, statistics: Tensor, dout: Tensor, dlse: Tensor | None
    ) -> tuple[Gradients, tuple[Launched | None, ...]]:
        """By `launch`; returns what that returns, too, and None for a kernel nobody needs."""
        raise NotImplementedError

    def again(self, stream: int, given: BackwardTensors, addresses: list[int]) -> Gradients:
        raise NotImplementedError

    def row_statistics(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """lse in log2 units, in fp64, and delta of all rows, [sequences, Hq, q_slots, block_q]."""
        raise NotImplementedError

    def launch(
        self, kernel: Any, grid: Grid, arguments: tuple[Any, ...], constants: dict[str, Any],
        **options: int,
    ) -> Launched:  # fmt: skip
        """Run a kernel whose parameters are `arguments`, then `constants`, in this order. All but
        the first of its kind skip Triton's look at every argument: it would find the same."""
        key = (kernel, self.device, *constants.values(), *map(_traits, arguments))
        compiled = _COMPILED.get(key)
        if compiled is None:
            compiled = _COMPILED[key] = kernel[grid](*arguments, **constants, **options)
        else:
            compiled[grid](*arguments, *constants.values())
        return partial(launcher_of, compiled, grid, (*arguments, *constants.values()))

    def prepare_statistics(
        self,
        tensors: Tensors,
        results: tuple[Tensor, Tensor, Tensor, Tensor | None],
        stats: Tensor,
        bounds: Tensor | None,
        others: tuple[Tensor | None, ...] = (None, None, None, None),
        **options: int,
    ) -> Launched:
        """Launch `prepare_rows`. `results` are out, statistics, dout, dlse, `others` what
        narrow heads have besides: large, flags, turn, ticket."""
        problem, cut = self.problem, self.cut
        out, statistics, dout, dlse = results
        dout_strides = strides_of(dout, problem.layout == "varlen")
        return self.launch(
            prepare_rows,
            (cut.n_tiles, 1, 1),
            (
                *(out, dout, statistics, dlse, stats, *others, bounds),
                *(tensors.cu_seqlens_q, tensors.cu_seqlens_k),
                *(*(stride // ALIGNMENT for stride in dout_strides), *row_arguments(problem, cut)),
                problem.score_unit,
            ),
            {"ALIGN": ALIGNMENT, "DV": problem.Dv, "BLOCK_D": cut.block_d, "BLOCK_Q": cut.block_q},
            **options,
        )

    def wanted(
        self,
        dq: Tensor | None,
        dk: Tensor | None,
        dv: Tensor | None,
        sinks: Tensor | None,
        memory: Tensor,
    ) -> Gradients:
        """Of what was computed, what is needed. `memory` is what `row_statistics` takes."""
        needs = self.needs
        dsinks = _sink_gradient(sinks, *self.row_statistics(memory)) if needs.sinks else None
        return Gradients(dq, dk if needs.k else None, dv if needs.v else None, None, dsinks)


def _fit_inputs(given: BackwardTensors) -> BackwardTensors:
    """As the copy engine takes them; with kv_lens, k and v have as many rows to a sequence."""
    q, k, v, dout = fit(given.q), fit(given.k), fit(given.v), fit(given.dout)
    if given.kv_lens is not None and (not batch_rows(k) or batch_rows(k) != batch_rows(v)):
        k, v = copy(k), copy(v)
    return given._replace(q=q, k=k, v=v, dout=dout)


def row_arguments(problem: AttentionProblem, cut: Cut) -> tuple[int, ...]:
    """Strides of contiguous rows, and sizes, as `rows` takes them."""
    packed = problem.layout == "varlen"
    strides = (0, 1, problem.Hq) if packed else (problem.Hq * problem.Sq, problem.Sq, 1)
    return *strides, problem.Hq, problem.B, problem.Sq, problem.Skv, cut.q_slots


def _traits(argument: Any) -> Any:
    """What of an argument a compiled kernel depends on: of numbers nothing but their types."""
    if argument is None:
        return None
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, TensorDescriptor):
        return argument.base.dtype, *argument.block_shape
    return type(argument), -(1 << 31) <= argument < 1 << 31


def raggedness(problem: AttentionProblem) -> tuple[bool, bool]:
    """Whether queries, and whether keys, are clipped to those of a sequence."""
    packed = problem.layout == "varlen"
    return packed, packed or problem.has_kv_lens


def scales_of(problem: AttentionProblem) -> tuple[float, float, float]:
    """scale, the unit of scores, and the cap."""
    return problem.scale, problem.score_unit, problem.softcap or 0.0


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
        "HIDES_SCORES": problem.has_raw_scores,
    }


def reach(problem: AttentionProblem) -> tuple[int, int]:
    """Keys seen left and right of the diagonal."""
    left, right = (FAR if side is None else min(side, FAR) for side in problem.window)
    return left, right


def masks(problem: AttentionProblem) -> dict[str, bool]:
    left, right = problem.window
    return {"HAS_LEFT": left is not None, "HAS_RIGHT": right is not None}


def _sink_gradient(sinks: Tensor | None, lse2: Tensor, delta: Tensor) -> Tensor:
    """dsink = -Σ_rows exp(sink - lse) · delta [Hq], summed in fp64; lse2 and delta have heads in
    their second dim."""
    assert sinks is not None
    sinks2 = sinks.double().view(1, -1, 1, 1) * LOG2E
    # A sink of -inf is none, whatever a row holds.
    weight = torch.exp2(sinks2 - lse2).masked_fill(sinks2 == -torch.inf, 0.0)
    return -(weight * delta).sum((0, 2, 3)).to(sinks.dtype)
