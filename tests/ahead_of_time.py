"""What GPU tests and benchmarks compile, compiled before on a machine without a GPU.

Where time on a GPU is short, most of it goes into compiling. On any machine, of any Python:

    python -O tests/ahead_of_time.py plan builds.pkl tests/kernels/test_hopper_groups_gpu.py
    python -O tests/ahead_of_time.py plan more.pkl --case seed:16:decode --case models:forward
    python tests/ahead_of_time.py compile cache builds.pkl more.pkl

On the machine with the GPU, and the folder `cache` at any place:

    TRITON_CACHE_DIR=cache PYTHONPATH=src:tests python -m pytest -p ahead_of_time -m gpu tests/...
    TRITON_CACHE_DIR=cache python tests/ahead_of_time.py run benchmarks/models_h200.py --seed 16 ...

`plan` runs the tests themselves, without launching anything: results are memory as it was, and with
-O no assertion looks at them. It takes the GPU for an H200. Triton's keys cover its own files and
the machine; here and under this plugin they cover the kernel, its arguments and options alone, so
both sides need the same version of Triton.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import runpy
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

HERE = Path(__file__).resolve().parent
CAPABILITY, PROCESSORS, SHARED_BYTES = (9, 0), 132, 232448
# What checks results, by name, in helpers and test modules.
CHECKS = ("assert_same_bits", "assert_allowed", "assert_exact")
# Files of a build that no launch needs.
UNUSED = (".ttir", ".ttgir", ".llir", ".source")


def fix_keys() -> None:
    """Make the keys of builds those of any machine, and their folder one that may be moved."""
    from triton.compiler import compiler
    from triton.runtime import cache

    def key(source: Any, backend: Any, options: Any, env_vars: Any) -> str:
        return f"ahead-of-time-{source.hash()}-{options.hash()}"

    def group(self: Any, name: str) -> dict[str, str] | None:
        path = Path(self.cache_dir) / f"__grp__{name}"
        if not path.exists():
            return None
        parts = json.loads(path.read_text())["child_paths"]
        return {part: str(at) for part in parts if (at := path.parent / part).exists()}

    compiler.get_cache_key = cache.get_cache_key = key
    cache.FileCacheManager.get_group = group


def pytest_configure(config: Any) -> None:
    """As a plugin: `python -m pytest -p ahead_of_time`."""
    fix_keys()


def pretend_h200(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    """Have torch, Triton and Lockstep take this machine for one with an H200."""
    import torch
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver

    from lockstep.call import prepare
    from lockstep.kernels import triton
    from lockstep.kernels.hopper.backward.medium import call as medium
    from lockstep.kernels.hopper.backward.narrow import call as narrow
    from lockstep.kernels.hopper.common import requirements
    from lockstep.kernels.hopper.decode import launch as decode
    from lockstep.kernels.hopper.forward import launch as forward
    from lockstep.kernels.triton import backward as triton_backward
    from lockstep.kernels.triton import launch as triton_launch
    from lockstep.kernels.triton.plan import Device

    answers = {"is_available": True, "get_device_capability": CAPABILITY, "current_device": 0}
    answers |= {"device_count": 1, "is_initialized": False, "is_current_stream_capturing": False}
    answers |= {"synchronize": None, "empty_cache": None, "memory_allocated": 0}
    for name, answer in answers.items():
        patch(torch.cuda, name, lambda *_, answer=answer, **__: answer)
    target = GPUTarget("cuda", CAPABILITY[0] * 10 + CAPABILITY[1], 32)
    fake = SimpleNamespace(get_current_target=lambda: target, launcher_cls=_no_launcher)
    patch(driver, "_active", fake)
    describe = prepare.describe
    patch(prepare, "describe", lambda *args: replace(describe(*args), device_type="cuda"))
    device = Device(PROCESSORS, SHARED_BYTES, tma=True, early=True, least_block=64)
    for module in (triton_launch, triton_backward):
        patch(module, "device_of", lambda _: device)
    for module in (forward, narrow, medium, decode):
        patch(module, "processors", lambda _: PROCESSORS)
    for module in (requirements, triton):
        patch(module, "_capability", lambda _: CAPABILITY)


def _no_launcher(source: object, metadata: object) -> None:
    """In place of Triton's, which would look for a CUDA driver."""


@contextmanager
def planning() -> Iterator[dict[Any, Any]]:
    """The builds that calls would need; tensors on a GPU lie here."""
    import torch
    from torch.overrides import TorchFunctionMode

    from lockstep.kernels import compiled

    def here(x: Any) -> Any:
        return "cpu" if isinstance(x, str | torch.device) and str(x).startswith("cuda") else x

    class Here(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if getattr(function, "__name__", "") == "cuda":
                return args[0]
            kwargs = {name: here(x) for name, x in (kwargs or {}).items()}
            return function(*map(here, args), **kwargs)

    with torch.autograd.set_multithreading_enabled(False), compiled.planning() as found, Here():
        yield found


class Plan:
    """A pytest plugin that runs tests to find their builds."""

    def __init__(self) -> None:
        self.builds: dict[Any, Any] = {}

    def pytest_runtest_call(self, item: Any) -> None:
        import problems
        import torch

        for module in (problems, sys.modules[item.module.__name__]):
            for name in CHECKS:
                if hasattr(module, name):
                    setattr(module, name, lambda *_, **__: None)
        torch.equal = lambda *_: True
        run = item.runtest

        def runtest() -> None:
            with planning() as found:
                try:
                    run()
                finally:
                    self.builds = {**found, **self.builds}

        item.runtest = runtest


def plan_cases(what: str) -> dict[Any, Any]:
    """The builds of cases of `lockstep bench gpu --suite models`: seed:N:KIND or models:KIND."""
    import torch

    from lockstep.bench.models import cases, drawn
    from lockstep.bench.models.contender import call_of, ours
    from lockstep.bench.models.inputs import make

    kind = what.split(":")[-1]
    wanted = cases.choose("", [kind])
    if what.startswith("seed:"):
        wanted = [case for case in drawn.draw(int(what.split(":")[1])) if case.kind == kind]
    randn, torch.randn = torch.randn, torch.empty  # memory that nothing is written to takes no time
    try:
        with planning() as found, torch.no_grad():
            for case in wanted:
                call_of(ours()[0], make(case))()
    finally:
        torch.randn = randn
    return found


def plan(to: Path, tests: list[str], cases: list[str]) -> int:
    """Write what tests and cases need to a file; the exit status."""
    sys.path[:0] = [str(HERE), str(HERE / "kernels")]
    pretend_h200()
    found: dict[Any, Any] = {}
    if tests:
        import pytest

        plugin = Plan()
        options = ["-q", "--assert=plain", "-p", "no:cacheprovider", "-n", "0", "-m", "gpu"]
        pytest.main([*options, *tests], plugins=[plugin])
        found |= plugin.builds
    for what in cases:
        found |= plan_cases(what)
    to.write_bytes(pickle.dumps([(build.name, build.apart()) for build in found.values()]))
    print(f"{len(found)} builds in {to}")
    return 0 if found else 1


def compile_one(job: tuple[str, Any]) -> str:
    """Leave one build in the cache; what went wrong, if anything did."""
    fix_keys()
    name, build = job
    try:
        build()
    except Exception as error:
        return f"{name}: {error!r}"[:300]
    return ""


def compile_all(cache: Path, plans: list[Path], processes: int) -> int:
    """Compile what the files say, and keep what launches need; the exit status."""
    from rich.console import Console

    from lockstep.output.console import progress

    os.environ["TRITON_CACHE_DIR"] = str(cache.resolve())
    jobs = [job for path in plans for job in pickle.loads(path.read_bytes())]
    failed = []
    with ProcessPoolExecutor(processes) as pool:
        # Processes begin here, before there is a thread that shows progress.
        errors = pool.map(compile_one, jobs)
        with progress(Console(stderr=True), len(jobs)) as steps:
            for (name, _), error in zip(jobs, errors, strict=True):
                steps.say(name)
                steps.done()
                failed += [error] if error else []
    for path in cache.glob("*/*"):
        if path.suffix in UNUSED:
            path.unlink()
        elif path.suffix == ".ptx":
            # The driver's module asks it for the parameters.
            text = path.read_text()
            path.write_text(text[: text.index("\n{", text.index(".entry"))] + "\n{\n}\n")
    print(*failed, f"{len(jobs) - len(failed)} of {len(jobs)} builds in {cache}", sep="\n")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, dest="command")
    planned = commands.add_parser("plan", help="find the builds of tests and cases")
    planned.add_argument("to", type=Path, metavar="FILE")
    planned.add_argument("tests", nargs="*", help="files or tests, as pytest takes them")
    planned.add_argument("--case", action="append", default=[], help="seed:N:KIND or models:KIND")
    built = commands.add_parser("compile", help="compile them")
    built.add_argument("cache", type=Path, metavar="FOLDER")
    built.add_argument("plans", type=Path, nargs="+", metavar="FILE")
    built.add_argument("--processes", type=int, default=os.cpu_count())
    ran = commands.add_parser("run", help="run a script that finds them")
    ran.add_argument("script", nargs=argparse.REMAINDER, metavar="SCRIPT ...")
    options = parser.parse_args()
    if options.command == "plan":
        return plan(options.to, options.tests, options.case)
    if options.command == "run":
        fix_keys()
        sys.argv[:] = options.script
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
        return 0
    return compile_all(options.cache, options.plans, options.processes)


if __name__ == "__main__":
    # What is pickled names this module, not the script.
    from ahead_of_time import main

    raise SystemExit(main())
