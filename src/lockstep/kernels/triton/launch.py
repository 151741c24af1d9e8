"""From a problem to a launch: everything but the pointers is worked out once and kept."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from lockstep.kernels.allocate import allocator
from lockstep.kernels.device_call import DeviceCall
from lockstep.kernels.driver import Launcher, launcher_of
from lockstep.kernels.kernel import Prepared, Result
from lockstep.kernels.scratch import Allocating, allocate
from lockstep.kernels.triton.forward import attend
from lockstep.kernels.triton.plan import (
    FAR,
    INTERPRETER,
    LEAST_SPAN,
    Device,
    Plan,
    block_of,
    plan_of,
    stages_of,
)
from lockstep.kernels.triton.split_kv import reduce_parts
from lockstep.problem import AttentionProblem, Tensors

# Of what lies in a workspace; tensors begin at multiples of more.
ALIGNMENT = 128


def strides_of(problem: AttentionProblem, tensors: Tensors) -> dict[str, int]:
    """Strides by sequence (or page), head and token, whatever the layout; 0 where there is none."""
    q, k, v, bias = tensors[:4]
    orders = {"dense": ((0, 1, 2),) * 2, "varlen": ((None, 1, 0),) * 2}
    of_q, of_kv = orders.get(problem.layout, ((0, 1, 2), (0, 2, 1)))
    strides = {}
    for name, tensor, order in (("q", q, of_q), ("k", k, of_kv), ("v", v, of_kv)):
        for letter, dim in zip("bhs", order, strict=True):
            strides[f"stride_{name}{letter}"] = 0 if dim is None else tensor.stride(dim)
    for letter, dim in zip("bhqk", range(4), strict=True):
        broadcast = bias is None or bias.shape[dim] == 1
        strides[f"stride_b{letter}"] = 0 if broadcast else bias.stride(dim)
    strides["stride_tb"] = 0 if tensors.page_table is None else tensors.page_table.stride(0)
    Hq, Sq = problem.Hq, problem.Sq
    rows = (0, 1, Hq) if problem.layout == "varlen" else (Hq * Sq, Sq, 1)
    strides["stride_rb"], strides["stride_rh"], strides["stride_rs"] = rows
    return strides


def alignment(strides: dict[str, int], tensors: Tensors) -> int:
    """The largest number of elements, 16 bytes at most, that every row of q, k and v starts at."""
    size = tensors.q.element_size()
    widest = 16 // size
    of_qkv = (stride for name, stride in strides.items() if name[7] in "qkv")
    pointers = (tensor.data_ptr() // size for tensor in tensors[:3])
    return math.gcd(widest, *of_qkv, *pointers)


def scales_of(problem: AttentionProblem) -> dict[str, Any]:
    """The numbers and flags that `tiles.scores` takes."""
    cap = problem.softcap
    return {
        "cap_scale": 0.0 if cap is None else problem.scale / cap,
        "score_scale": problem.scale if cap is None else cap,
        "HAS_SOFTCAP": cap is not None,
        "PRECISION": "tf32" if problem.allow_tf32 else "ieee",
        "RAW": problem.has_raw_scores,
        **units_of(problem),
    }


def units_of(problem: AttentionProblem) -> dict[str, float]:
    """What turns scores into log2 units, and into natural ones."""
    return {
        "unit": problem.score_unit,
        "natural": problem.scale if problem.has_raw_scores else 1.0,
    }


def is_describable(
    problem: AttentionProblem,
    strides: dict[str, int],
    align: int,
    tensors: Tensors,
    BLOCK_KV: int,
) -> bool:
    """Whether a TMA descriptor can stand for the rows of a head of k and v."""
    if align * tensors.q.element_size() != 16 or 0 in (strides["stride_ks"], strides["stride_vs"]):
        return False
    if problem.page_size is None:
        return True
    # Pages that follow one another without a gap, and tiles that lie in one page.
    page = problem.page_size
    gapless = all(strides[f"stride_{n}b"] == page * strides[f"stride_{n}s"] for n in "kv")
    return gapless and page % BLOCK_KV == 0


def attend_arguments(problem: AttentionProblem, tensors: Tensors, plan: Plan) -> dict[str, Any]:
    """All arguments of `forward.attend` but the pointers."""
    strides = strides_of(problem, tensors)
    align = alignment(strides, tensors)
    for name in strides:
        if name[7] in "qkv":
            strides[name] //= align
    tiles = plan.tiles
    return {
        **strides,
        **window_of(problem),
        **scales_of(problem),
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
        "TMA": plan.tma and is_describable(problem, strides, align, tensors, tiles.BLOCK_KV),
        "FOLDS": plan.n_spans > 1,
        "LEAST_SPAN": LEAST_SPAN,
        "EARLY": plan.early,
        "BLOCK_Q": tiles.BLOCK_Q,
        "BLOCK_KV": tiles.BLOCK_KV,
        "BLOCK_D": plan.BLOCK_D,
        "BLOCK_DV": plan.BLOCK_DV,
    }


def options_of(problem: AttentionProblem, plan: Plan, device: Device) -> dict[str, int]:
    """What `forward.attend` is compiled with."""
    return plan.tiles.options | {"num_stages": stages_of(problem, plan, device.shared_bytes)}


def reduce_arguments(problem: AttentionProblem, plan: Plan) -> dict[str, Any]:
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
        "left": FAR if left is None else min(left, FAR),
        "right": FAR if right is None else min(right, FAR),
        "HAS_LEFT": left is not None,
        "HAS_RIGHT": right is not None,
    }


class Launch:
    """A kernel with its grid and everything but the pointers that lead its arguments.

    The first call compiles. Later calls go straight to the driver, without Triton looking at the
    type and the divisibility of every argument again: they are the same each time.
    """

    __slots__ = ("_grid", "_kernel", "_options", "_rest", "enqueue", "scratch_bytes")

    def __init__(
        self, kernel: Any, grid: tuple[int, ...], arguments: dict[str, Any], **options: Any
    ) -> None:
        self._kernel, self._options = kernel, options
        self._grid = (*grid, 1, 1)[:3]
        self._rest = tuple(arguments[n] for n in kernel.arg_names if not n.endswith("_ptr"))
        # Takes the stream and addresses, the last one that of `scratch_bytes`. Set once compiled.
        self.enqueue: Launcher | None = None
        # What Triton wants of global memory at each launch, for descriptors.
        self.scratch_bytes = 0

    def __call__(self, *pointers: Tensor | None) -> None:
        if self.enqueue is None:
            self._compile(*pointers)
            return
        assert pointers[0] is not None
        scratch = allocate(self.scratch_bytes) if self.scratch_bytes else None
        stream = torch._C._cuda_getCurrentRawStream(pointers[0].get_device())
        self.enqueue(stream, tuple(0 if x is None else x.data_ptr() for x in (*pointers, scratch)))

    def _compile(self, *pointers: Tensor | None) -> None:
        """Launches once as well."""
        arguments = (*pointers, *self._rest)
        with Allocating(allocate):
            compiled = self._kernel[self._grid](*arguments, **self._options)
        # The interpreter compiles nothing.
        if compiled is not None:
            of_program = getattr(compiled.metadata, "global_scratch_size", 0)
            self.scratch_bytes = math.prod(self._grid) * of_program
            self.enqueue = launcher_of(compiled, self._grid, arguments)


class Call(DeviceCall):
    """What runs one problem with inputs of given strides and alignment."""

    __slots__ = (
        *("attend", "device", "reduce", "part_shape", "part_stats_at", "scratch_at"),
        *("new_out", "new_lse", "new_statistics", "new_workspace", "is_ready"),
    )

    def __init__(
        self, problem: AttentionProblem, tensors: Tensors, plan: Plan, device: Device
    ) -> None:
        where = tensors.q.device
        self.device = -1 if where.index is None else where.index
        self.new_out = allocator(problem.out_shape, problem.dtype, where)
        self.new_lse = allocator(problem.lse_shape, problem.lse_dtype, where)
        self.new_statistics = (
            allocator(problem.statistics_shape, problem.lse_dtype, where)
            if problem.has_gradient
            else None
        )
        self.attend = Launch(
            attend,
            (plan.n_programs, plan.n_runs),
            attend_arguments(problem, tensors, plan),
            **options_of(problem, plan, device),
        )
        self.reduce: Launch | None = None
        self.part_shape: tuple[int, ...] = (0,)
        if plan.n_runs > 1:
            self.part_shape = (*problem.lse_shape, plan.n_spans, problem.Dv)
            self.reduce = Launch(
                reduce_parts,
                (math.prod(problem.lse_shape),),
                reduce_arguments(problem, plan),
                num_warps=1,
                **({"launch_pdl": True} if plan.early else {}),
            )
        # The workspace: parts, their m and l, then the scratch of `attend`, known once compiled.
        self.part_stats_at = _aligned(4 * math.prod(self.part_shape))
        of_stats = 8 * math.prod(self.part_shape[:-1]) if plan.n_runs > 1 else 0
        self.scratch_at = _aligned(self.part_stats_at + of_stats)
        self.new_workspace: Callable[[], Tensor] | None = None
        self.is_ready = False

    def _run(self, tensors: Tensors, addresses: list[int]) -> Result:
        out, lse = self.new_out(), self.new_lse()
        statistics = None if self.new_statistics is None else self.new_statistics()
        if not self.is_ready:
            self._first(tensors, out, lse, statistics)
            return out, lse, statistics
        start = 0
        if self.new_workspace is not None:
            # Held until the kernels are in the stream: whoever gets it next comes after them.
            workspace = self.new_workspace()
            start = workspace.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self.device)
        of_statistics = 0 if statistics is None else statistics.data_ptr()
        results = out.data_ptr(), lse.data_ptr(), of_statistics
        parts = start, start + self.part_stats_at
        # What was None when it was compiled is not looked at.
        self.attend.enqueue(stream, (*addresses, *results, *parts, start + self.scratch_at))
        if self.reduce is not None:
            self.reduce.enqueue(stream, (*parts, *addresses[4:8], *results, 0))
        return out, lse, statistics

    def _first(self, tensors: Tensors, out: Tensor, lse: Tensor, statistics: Tensor | None) -> None:
        """A call that compiles, which takes tensors to see what they are."""
        if self.reduce is None:
            self.attend(*tensors, out, lse, statistics, None, None)
        else:
            parts = out.new_empty(self.part_shape, dtype=lse.dtype)
            part_stats = out.new_empty((*self.part_shape[:-1], 2), dtype=lse.dtype)
            alone = tensors._replace(sinks=None)
            self.attend(*alone, out, lse, statistics, parts, part_stats)
            self.reduce(parts, part_stats, *tensors[4:8], out, lse, statistics)
        bytes_in_all = self.scratch_at + self.attend.scratch_bytes
        if self.attend.enqueue is not None and bytes_in_all:
            self.new_workspace = allocator((bytes_in_all,), torch.uint8, out.device)
        # Only now, as other threads may come while the second kernel compiles.
        self.is_ready = self.attend.enqueue is not None


def _aligned(at: int) -> int:
    return at + -at % ALIGNMENT


def prepare(problem: AttentionProblem, tensors: Tensors) -> Prepared:
    """`Kernel.prepare`"""
    if 0 in problem.lse_shape:
        return partial(_nothing, problem)
    device = device_of(tensors.q.device)
    addresses = tensors.addresses()
    # The same cu_seqlens: every packed sequence has as many keys as queries.
    own_keys = problem.layout == "varlen" and addresses[6] == addresses[7]
    return Call(problem, tensors, plan_of(problem, device, own_keys), device)


def _nothing(problem: AttentionProblem, tensors: Tensors, addresses: list[int]) -> Result:
    """Results without a single row."""
    out, lse = (
        tensors.q.new_empty(shape, dtype=dtype)
        for shape, dtype in (
            (problem.out_shape, problem.dtype),
            (problem.lse_shape, problem.lse_dtype),
        )
    )
    return out, lse, lse.new_empty(problem.statistics_shape) if problem.has_gradient else None


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
