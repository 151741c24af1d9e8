"""From a problem to a launch: everything but the pointers is worked out once and kept."""

from __future__ import annotations

import math
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.kernels.allocate import allocator
from lockstep.kernels.device_call import DeviceCall
from lockstep.kernels.driver import Launcher, launcher_of
from lockstep.kernels.hopper.common.copy_engine import ALIGNMENT, copy, fit, ragged
from lockstep.kernels.hopper.common.gluon_shim import TensorDescriptor, gl
from lockstep.kernels.hopper.forward.kernel import forward_kernel
from lockstep.kernels.hopper.forward.plan import (
    OUT_COLUMNS,
    REGISTERS,
    ROWS,
    keys_in_l2,
    padded,
    pays_to_pair,
    plan_of,
)
from lockstep.kernels.hopper.forward.schedule import BY_HEAD, LONGEST_FIRST, PAIRED, UNSORTED
from lockstep.kernels.hopper.forward.sequence_order import SequenceOrder
from lockstep.kernels.kernel import Prepared, Result
from lockstep.problem import AttentionProblem, Tensors

GLUON_DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}


class Shape(NamedTuple):
    """A tensor map without its tensor."""

    shape: list[int]
    strides: list[int]
    block: list[int]

    def describe(self, x: Tensor) -> TensorDescriptor:
        layout = gl.NVMMASharedLayout.get_default_for(self.block, GLUON_DTYPES[x.dtype])
        return TensorDescriptor(x, self.shape, self.strides, self.block, layout)


class Call(DeviceCall):
    """What runs one problem with inputs of given strides and alignment."""

    def __init__(self, problem: AttentionProblem, tensors: Tensors, n_processors: int) -> None:
        self.problem = problem
        plan = plan_of(problem)
        packed = problem.layout == "varlen"
        layout = "varlen" if packed else "kv_lens" if problem.has_kv_lens else "dense"
        q, k, v = tensors[:3]
        self.device = q.get_device()
        self.new_out = allocator(problem.out_shape, problem.dtype, q.device)
        self.new_lse = allocator(problem.lse_shape, torch.float32, q.device)
        self.new_statistics = allocator(problem.statistics_shape, torch.float32, q.device)
        fitted = (fit(q), *_fit_keys(k, v, share_rows=layout == "kv_lens"))
        self.copied = tuple(x is not y for x, y in zip((q, k, v), fitted, strict=True))
        width, width_v = padded(problem.D), padded(problem.Dv)
        out = q.new_empty(problem.out_shape, device="meta")
        self.shapes = (
            _shape(_by_head(fitted[0], packed), ROWS, width, packed),
            _shape(_by_head(fitted[1], packed), plan.block_kv, width, layout != "dense"),
            _shape(_by_head(fitted[2], packed), plan.block_kv, width_v, layout != "dense"),
            _shape(_by_head(out, packed), ROWS, min(width_v, OUT_COLUMNS), packed),
        )
        self.numbers = self._numbers(layout, fitted[1], n_processors)
        self.constants = (
            layout,
            problem.window[0] is not None,
            problem.window[1] is not None,
            _scales(problem)[0],
            problem.has_sinks,
            plan.consumers,
            plan.stages,
            plan.pingpong,
            # bf16 weights have the exponents of fp32; fp16 weights would overflow.
            problem.dtype == torch.bfloat16,
            True,
            plan.q_stages,
            *REGISTERS[plan.consumers][1:],
        )
        self.options = {"num_warps": 4, "maxnreg": REGISTERS[plan.consumers][0]}
        self._launcher: Launcher | None = None

    def _numbers(self, layout: str, k: Tensor, n_processors: int) -> tuple[float, ...]:
        """The arguments behind the pointers; sets the grid."""
        problem, plan = self.problem, plan_of(self.problem)
        B, Hq, Sq = problem.B, problem.Hq, problem.Sq
        left, right = problem.window
        if layout == "varlen":
            # One more for rows that no sequence owns.
            heads, n_q_tiles = Hq, Sq // plan.block_q + B + 1
            row_strides = (0, 1, Hq)
        else:
            heads, n_q_tiles = B * Hq, -(-Sq // plan.block_q)
            row_strides = (Hq * Sq, Sq, 1)
        order = LONGEST_FIRST
        self._line: SequenceOrder | None = None
        if layout == "varlen":
            n_tickets = heads * n_q_tiles
            if n_tickets <= n_processors:
                order = UNSORTED
            sizes = (B, Sq, problem.Skv, plan.block_q, n_tickets)
            self._line = SequenceOrder(*sizes, sorts=n_tickets > n_processors)
        elif left is not None or right is None:
            order = BY_HEAD
        else:
            head_bytes = problem.Skv * (problem.D + problem.Dv) * 2 * problem.Hkv // Hq
            if pays_to_pair(heads, n_q_tiles, n_processors, head_bytes):
                order = PAIRED
        self.grid = (min(n_processors, heads * n_q_tiles), 1, 1)
        return (
            *_scales(problem)[1:],
            *row_strides,
            problem.Dv,
            order.value,
            n_q_tiles,
            heads,
            Hq,
            Hq // problem.Hkv,
            B,
            Sq,
            problem.Skv,
            left or 0,
            right or 0,
            # From one batch to the next in a ragged map of k and v.
            0 if B == 1 or layout != "kv_lens" else k.stride(0) // k.stride(2),
            keys_in_l2(problem),
        )

    def arguments(
        self,
        tensors: Tensors,
        out: Tensor,
        lse: Tensor,
        statistics: Tensor,
        line: Tensor | None = None,
    ) -> tuple[Any, ...]:
        """What `forward_kernel` takes, to compile it."""
        bases = (*self._fitted(tensors), out)
        maps = (s.describe(x) for s, x in zip(self.shapes, bases, strict=True))
        pointers = self._pointers(tensors, out, lse, statistics, line)
        return (*maps, *pointers, *self.numbers, *self.constants)

    def _fitted(self, tensors: Tensors) -> tuple[Tensor, ...]:
        return tuple(
            copy(x) if copied else x for x, copied in zip(tensors[:3], self.copied, strict=True)
        )

    def _pointers(
        self, tensors: Tensors, out: Tensor, lse: Tensor, statistics: Tensor, line: Tensor | None
    ) -> tuple[Tensor, ...]:
        _, _, _, _, sinks, kv_lens, cu_q, cu_k, _ = tensors
        # A pointer that is not used may be any.
        return (
            out,
            lse,
            statistics,
            lse if sinks is None else sinks,
            lse if cu_q is None else cu_q,
            lse if cu_k is None else cu_k,
            lse if kv_lens is None else kv_lens,
            lse if line is None else line,
        )

    def _run(self, tensors: Tensors, addresses: list[int]) -> Result:
        out, lse, statistics = self.new_out(), self.new_lse(), self.new_statistics()
        line = None if self._line is None else self._line(tensors)
        if self._launcher is None:
            arguments = self.arguments(tensors, out, lse, statistics, line)
            compiled = forward_kernel[self.grid](*arguments, **self.options)
            self._launcher = launcher_of(compiled, self.grid, arguments)
            return out, lse, statistics
        if True in self.copied:
            # Held until the kernel is in the stream.
            tensors = Tensors(*self._fitted(tensors), *tensors[3:])
            addresses = tensors.addresses()
        q, k, v, _, sinks, kv_lens, cu_q, cu_k, _ = addresses
        of_out, of_lse = out.data_ptr(), lse.data_ptr()
        of_line = 0 if line is None else line.data_ptr()
        # In the order of `_pointers`, and no scratch memory.
        pointers = (sinks, cu_q, cu_k, kv_lens, of_line)
        self._launcher(
            torch._C._cuda_getCurrentRawStream(self.device),
            (
                *(of_out, of_lse, statistics.data_ptr()),
                *(address or of_lse for address in pointers),
                0,
            ),
            (q, k, v, of_out),
        )
        return out, lse, statistics


def prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    """`Kernel.prepare`, of a problem that `supports` lets through."""
    if 0 in problem.out_shape or not problem.Skv:
        return partial(_without_keys, problem)
    return Call(problem, tensors, processors(tensors.q.device))


def _without_keys(problem: AttentionProblem, tensors: Tensors, addresses: list[int]) -> Result:
    q, sinks = tensors.q, tensors.sinks
    out = q.new_zeros(problem.out_shape)
    lse = q.new_full(problem.lse_shape, -math.inf, dtype=torch.float32)
    if sinks is not None:
        lse.copy_(sinks if problem.layout == "varlen" else sinks[:, None])
    # Without a key, whatever they are: there is no weight to compute again.
    return out, lse, lse.new_ones(problem.statistics_shape)


@lru_cache(maxsize=64)
def processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _scales(problem: AttentionProblem) -> tuple[str, float, float]:
    """How scores become log2 units: see `program.Program.see`."""
    if problem.softcap is not None:
        return "capped", problem.scale / problem.softcap, problem.softcap
    if problem.has_raw_scores:
        return "raw", problem.score_unit, 0.0
    return "scaled", problem.scale, 0.0


def _by_head(x: Tensor, packed: bool) -> Tensor:
    """[B, H, S, D] as it is; [T, H, D] as [1, H, T, D]."""
    return x.transpose(0, 1)[None] if packed else x


def _fit_keys(k: Tensor, v: Tensor, share_rows: bool) -> tuple[Tensor, Tensor]:
    """k and v to fit; where they share it, with one number of rows from a batch to the next."""
    k, v = fit(k), fit(v)
    if not share_rows or k.shape[0] == 1:
        return k, v
    steps = {x.stride(0) / x.stride(2) if x.shape[2] > 1 else 0.5 for x in (k, v)}
    if len(steps) == 1 and steps.pop().is_integer():
        return k, v
    return copy(k), copy(v)


def _shape(x: Tensor, rows: int, width: int, clipped: bool) -> Shape:
    """The tensor map of x [B, H, S, D] in tiles [rows, width], or clipped to a sequence's rows."""
    B, H, S, D = x.shape
    # The stride of a dim of size 1 means nothing and may be anything.
    sb, sh, ss = (
        stride if size > 1 else ALIGNMENT
        for size, stride in zip(x.shape[:3], x.stride(), strict=False)
    )
    if S == 1:
        ss = -(-D // ALIGNMENT) * ALIGNMENT
    block = [1, 1, 1, rows, width]
    if clipped:
        return Shape(*ragged(H, D, sh, ss), block)
    return Shape([1, B, H, S, D], [ALIGNMENT, sb, sh, ss, 1], block)
