"""Secrets followed through the machine code of GPU kernels, cross-compiled: no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

from lockstep.audit.timing.gpu_leaks import GPU_LEAKS, N
from lockstep.audit.timing.subjects import RUNG_PROBLEM
from lockstep.ladder import RUNGS, Problem, launches_of
from lockstep.simt import Kernel
from lockstep.simt.cuda_cpp import emit
from lockstep.simt.errors import SimtError
from lockstep.simt.nvrtc import compile_source
from lockstep.simt.sass import nvdisasm_path
from lockstep.simt.taint import Leak, find_leaks

CAPABILITIES = (80, 90)
Find = Callable[[], list[Leak]]


def missing() -> str | None:
    """The reason why this layer cannot run here; None if it can."""
    for package, name in (("triton", "triton"), ("cuda", "the extra gpu")):
        if find_spec(package) is None:
            return f"needs {name}"
    try:
        nvdisasm_path()
    except SimtError as error:
        return str(error)
    return None


def builds() -> Iterator[tuple[str, Find]]:
    """Every constant-time build by name, and what looks for leaks in it."""
    from lockstep.audit.timing import hopper_code, triton_code

    yield from triton_code.builds(CAPABILITIES)
    yield from hopper_code.builds()
    yield from rungs()


def rungs() -> Iterator[tuple[str, Find]]:
    """Every constant-time rung of the ladder, launch by launch."""
    for rung, capability in product(RUNGS, CAPABILITIES):
        if rung.constant_time:
            for step in rung.steps():
                problem = Problem(**{**RUNG_PROBLEM.__dict__, "length": 40})
                launches = launches_of(step, problem, problem.draw())
                for launch in launches:
                    kernel: Any = launch.kernel
                    name = f"ladder: {step.title}, {kernel.__name__} for sm_{capability}"
                    arguments = launch.arguments
                    yield name, partial(_leaks, kernel, capability, launch.block, arguments)


def leaks() -> Iterator[tuple[str, Find]]:
    """Every planted leak."""
    for (name, leak), capability in product(GPU_LEAKS.items(), CAPABILITIES):
        yield f"{name} for sm_{capability}", partial(_leaks, leak.kernel, capability, N, {})


def _leaks(kernel: Kernel, capability: int, threads: int, arguments: dict[str, Any]) -> list[Leak]:
    compiled = compile_source(emit(kernel.typed(**arguments), threads=threads), f"sm_{capability}")
    return find_leaks(compiled.cubin)
