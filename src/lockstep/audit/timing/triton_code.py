"""The constant-time builds of the Triton kernels, cross-compiled for GPUs that are not here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.runtime.jit import create_function_from_signature

from lockstep.hardware import SHARED_BYTES
from lockstep.kernels.kernel import BackwardTensors, Needs
from lockstep.kernels.launch import Launch, Launches
from lockstep.kernels.triton import backward, launch, plan
from lockstep.problem import Options, Tensors, describe
from lockstep.simt.taint import Leak, find_leaks

DEVICES = {
    80: plan.Device(multiprocessors=108, shared_bytes=163 << 10, tma=False),
    90: plan.Device(132, shared_bytes=SHARED_BYTES, tma=True, early=True, least_block=64),
}
# Metadata, and what kernels count with: none of it holds secrets. `kv_lens` is not among them.
PUBLIC = [
    "cu_q",
    "cu_kv",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "page_table",
    "bounds",
    "sequence_order",
    "ticket",
    "turn",
]
_LENGTHS = ("kv_lens", "kv_starts")


Find = Callable[[], list[Leak]]


class Bound(NamedTuple):
    """A launch with its arguments."""

    launch: Launch
    arguments: tuple[Any, ...]


def bind(call: Launches, tensors: Sequence[Tensor | None]) -> dict[str, Bound]:
    """Each launch of a call with these inputs, by the name of its kernel."""
    results = [new() for new in call._new_results.values()]
    named = call.named(tensors, results, torch.empty(call.workspace_bytes, dtype=torch.uint8))
    return {launch.name: Bound(launch, launch.bind(named)) for launch in call.launches}


class Source(NamedTuple):
    """What Triton compiles for a launch."""

    source: ASTSource
    backend: Any
    options: Any

    def compile(self) -> Any:
        """The kernel, compiled for the GPU of the backend."""
        return triton.compile(
            self.source, target=self.backend.target, options=self.options.__dict__
        )


def source_of(
    function: Any, arguments: Sequence[Any], options: Mapping[str, Any], capability: int
) -> Source:
    """A kernel as a launch with these arguments has it compiled, for a GPU that is not here."""
    backend = make_backend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(function.signature, function.params, backend)
    bound, specialization, chosen = bind(*arguments, **options)
    chosen, *described = function._pack_args(backend, dict(options), bound, specialization, chosen)
    kind = GluonASTSource if isinstance(function, GluonJITFunction) else ASTSource
    return Source(kind(function, *described), backend, chosen)


def compile_bound(bound: Bound, capability: int) -> Any:
    """A launch with its arguments, compiled for a GPU that is not here."""
    launch = bound.launch
    return source_of(launch.kernel, bound.arguments, launch.options, capability).compile()


def leaks_of(kernel: Any, secret_lengths: bool = False) -> list[Leak]:
    """Leaks in a kernel that Triton compiled."""
    names = parameters_of(kernel)
    public = {f"{name}_ptr" for name in (*PUBLIC, *(() if secret_lengths else _LENGTHS))}
    return find_leaks(kernel.asm["cubin"], {i for i, name in enumerate(names) if name in public})


def parameters_of(kernel: Any) -> list[str]:
    """The names of the parameters of the machine code; a tensor map has more of them after it."""
    found = []
    for name, kind in kernel.src.signature.items():
        if kind == "constexpr":
            continue
        found.append(name)
        if str(kind).startswith("tensordesc"):
            rank = str(kind).partition("[")[2].partition("]")[0].count(",") + 1
            found += [f"{name} size"] * rank + [f"{name} stride"] * rank
    return found


class Build(NamedTuple):
    """A call: which GPUs it is compiled for, its tensors and its options."""

    name: str
    capabilities: tuple[int, ...]
    tensors: Tensors
    options: Options
    backward: bool = False


def builds(capabilities: Sequence[int]) -> Iterator[tuple[str, Find]]:
    """Every build by name, and what looks for leaks in it."""
    for build in calls():
        for capability in set(build.capabilities).intersection(capabilities):
            name = f"triton: {build.name} for sm_{capability}"
            yield name, partial(leaks_in, build, capability)


def leaks_in(build: Build, capability: int) -> list[Leak]:
    """Leaks in all kernels of a call."""
    device, tensors = DEVICES[capability], build.tensors
    problem = describe(tensors, build.options)
    given: Sequence[Tensor | None] = tensors
    if build.backward:
        out = tensors.q.new_empty(*tensors.q.shape[:-1], tensors.v.shape[-1])
        given = BackwardTensors(*tensors, out, out[..., :2].float().contiguous(), out, None)
        with patch.object(backward, "device_of", lambda _: device):
            call = backward.backward_launches(problem, given, Needs(*[True] * 5))
    else:
        chosen = plan.plan_of(problem, device)
        call = launch.forward_launches(problem, tensors, chosen, device)
    return leaks_of_call(call, given, capability, problem.secret_lengths)


def leaks_of_call(
    call: Launches, given: Sequence[Tensor | None], capability: int, secret_lengths: bool = False
) -> list[Leak]:
    """Leaks in all launches of a call with these inputs."""
    kernels = [compile_bound(bound, capability) for bound in bind(call, given).values()]
    return [leak for kernel in kernels for leak in leaks_of(kernel, secret_lengths)]


def calls() -> Iterator[Build]:
    """The kinds of calls that are audited."""
    ordinary = Options(constant_time=True, causal=True)
    secret = Options(constant_time=True, secret_lengths=True, causal=True)
    lengths = torch.tensor([5000, 100], dtype=torch.int32)
    yield Build("forward", (80, 90), _tensors(20000, 5000), ordinary)
    lengthy = _tensors(1000, 5000, kv_lens=lengths[:1])
    yield Build("forward, secret lengths", (80, 90), lengthy, secret)
    yield Build("backward", (80, 90), _tensors(300, 300), ordinary, backward=True)
    decode = _tensors(1, 5120, kv_lens=lengths)
    yield Build("decode", (80, 90), decode, ordinary)
    yield Build("decode, secret lengths", (80, 90), decode, secret)
    pages = torch.arange(40, dtype=torch.int32).view(2, 20)
    cache = {name: torch.zeros(40, 256, 1, 64, dtype=torch.bfloat16) for name in "kv"}
    paged = decode._replace(page_table=pages, **cache)
    yield Build("pages, secret lengths", (80, 90), paged, secret)


def _tensors(Sq: int, Skv: int, **more: Tensor) -> Tensors:
    B = len(more["kv_lens"]) if more else 1
    q = torch.zeros(B, 4, Sq, 64, dtype=torch.bfloat16)
    k, v = torch.zeros(2, B, 1, Skv, 64, dtype=torch.bfloat16)
    return Tensors(q, k, v, **more)
