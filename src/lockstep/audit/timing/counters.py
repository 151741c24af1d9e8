"""What a GPU counts while a call runs: the same for all secrets, to the last one?

Nsight Compute (`ncu`) runs this module as a program that calls every subject on secrets of every
class, and reads the counters of each kernel. An empty kernel, `marker`, goes before each subject.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.audit.timing import subjects
from lockstep.audit.timing.gpu_leaks import marker
from lockstep.audit.timing.subjects import Secrets, Subject

_SHARED = "l1tex_data_pipe_lsu_wavefronts_mem_shared"
# Most are counted by instructions that Nsight Compute adds to the kernel; `l1tex__` by the GPU.
METRICS = {
    "instructions": "smsp__sass_inst_executed",
    "thread instructions": "smsp__sass_thread_inst_executed",
    "branches": "smsp__sass_inst_executed_op_branch",
    "branch targets": "smsp__sass_branch_targets",
    "uniform branches": "smsp__sass_branch_targets_threads_uniform",
    "divergent branches": "smsp__sass_branch_targets_threads_divergent",
    **{
        f"{space} {op}": f"smsp__sass_inst_executed_op_{space}_{op}"
        for space in ("global", "shared", "local")
        for op in ("ld", "st")
    },
    **{
        f"{what} {op}": f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}"
        for what in ("requests", "sectors")
        for op in ("ld", "st")
    },
    **{f"wavefronts {op}": f"smsp__sass_{_SHARED}_op_{op}" for op in ("ld", "st")},
}
# By the name of the instruction; ncu does not list it.
OPCODES = "sass__inst_executed_per_opcode"
RANDOM, AGAIN = "random", ("random, again", "random, once more")


@dataclass(frozen=True)
class Counts:
    """Counters of the kernels of one call, in the order of their launches."""

    subject: str
    secrets: str
    kernels: tuple[str, ...]
    values: tuple[dict[str, float], ...]


def is_available() -> bool:
    return shutil.which("ncu") is not None


def count(groups: tuple[str, ...]) -> list[Counts]:
    """Counters of all subjects of the groups, "kernels", "rungs" or "leaks", class by class.

    Raises RuntimeError where Nsight Compute fails.
    """
    metrics = _known_metrics()
    command = [
        *("ncu", "--csv", "--clock-control", "none", "--print-units", "base"),
        *("--print-metric-instances", "details", "--profile-from-start", "off"),
        *("--metrics", ",".join([*metrics.values(), OPCODES])),
        *(sys.executable, "-m", __name__, *groups),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or '"ID"' not in done.stdout:
        raise RuntimeError(f"ncu failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    launches = read(done.stdout, {name: key for key, name in metrics.items()})
    return list(calls(launches, chosen(groups)))


def read(text: str, short: dict[str, str]) -> list[tuple[str, dict[str, float]]]:
    """The name of each kernel of a report, and what was counted, by short names of counters."""
    found: dict[int, tuple[str, dict[str, float]]] = {}
    for record in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        _, values = found.setdefault(int(record["ID"]), (record["Kernel Name"], {}))
        name, value = record["Metric Name"], record["Metric Value"]
        # "12", or with instances "12 (BRA: 2; FADD: 10)".
        total, _, instances = value.partition("(")
        if name == OPCODES:
            for instance in instances.rstrip(") ").split(";"):
                opcode, _, times = instance.rpartition(":")
                if opcode:
                    values[opcode.strip()] = _number(times)
        else:
            values[short[name]] = _number(total)
    return [found[i] for i in sorted(found)]


def _number(text: str) -> float:
    text = text.replace(",", "").strip()
    return float(text) if text not in ("", "n/a") else 0.0


def calls(launches: Iterable[tuple[str, dict[str, float]]], of: Iterable[Subject]) -> list[Counts]:
    """Launches by subject and class: after a marker, as many for each class.

    Raises RuntimeError where that is not so.
    """
    by_subject: list[list[tuple[str, dict[str, float]]]] = []
    for launch in launches:
        if launch[0].startswith("marker"):
            by_subject.append([])
        else:
            by_subject[-1].append(launch)
    found = []
    for subject, mine in zip(of, by_subject, strict=True):
        names = classes_of(subject)
        each, left = divmod(len(mine), len(names))
        if left or not each:
            raise RuntimeError(f"{subject.name}: {len(mine)} launches for {len(names)} calls")
        for i, name in enumerate(names):
            kernels, values = zip(*mine[i * each : (i + 1) * each], strict=True)
            found.append(Counts(subject.name, name, kernels, values))
    return found


def differing(counted: Iterable[Counts]) -> dict[str, list[str]]:
    """What differs from the counters of random secrets, by subject: "zeros: attend: ..."."""
    found: dict[str, list[str]] = {}
    base: dict[str, Counts] = {}
    for counts in counted:
        first = base.setdefault(counts.subject, counts)
        lines = [f"{counts.secrets}: {line}" for line in differences(first, counts)]
        found.setdefault(counts.subject, []).extend(lines)
    return found


def differences(base: Counts, other: Counts) -> list[str]:
    """What differs between two calls: "kernel: counter 12 -> 14"."""
    if base.kernels != other.kernels:
        return [f"kernels {base.kernels} -> {other.kernels}"]
    return [
        f"{kernel}: {key} {x.get(key, 0):.0f} -> {y.get(key, 0):.0f}"
        for kernel, x, y in zip(base.kernels, base.values, other.values, strict=True)
        for key in sorted({*x, *y})
        if x.get(key, 0) != y.get(key, 0)
    ]


def _known_metrics() -> dict[str, str]:
    """The METRICS that this GPU has."""
    command = ["ncu", "--query-metrics"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    return {short: f"{name}.sum" for short, name in METRICS.items() if name in names}


def chosen(groups: tuple[str, ...]) -> list[Subject]:
    """The subjects of these groups."""
    makers = {"kernels": subjects.kernels, "rungs": subjects.rungs, "leaks": subjects.leaks}
    return [subject for group in groups for subject in makers[group]()]


def classes_of(subject: Subject) -> tuple[str, ...]:
    return (RANDOM, *AGAIN, "other random", *subject.fixes, *subject.number_fixes)


def _secrets(subject: Subject) -> Iterator[Secrets]:
    """Secrets of each class, in the order of `classes_of`."""
    generator = torch.Generator().manual_seed(0)
    first = subject.draw(generator)
    yield from [first] * (1 + len(AGAIN))
    yield subject.draw(generator)
    for fix in (*subject.fixes.values(), *subject.number_fixes.values()):
        yield fix(subject.draw(generator))


def _call_all(groups: tuple[str, ...]) -> None:
    """Calls each subject on secrets of each class, in the same memory; Nsight Compute counts."""
    profiler: Any = torch.cuda.profiler
    mark = torch.zeros(1, device="cuda")
    for subject in chosen(groups):
        buffers: Secrets = {}
        for i, secrets in enumerate(_secrets(subject)):
            for name, x in secrets.items():
                on_gpu = buffers.setdefault(name, x.cuda() if x.dim() else x.clone())
                on_gpu.copy_(x)
            used = {name: buffers[name] for name in secrets}
            subject.run(used)
            torch.cuda.synchronize()
            profiler.start()
            if i == 0:
                marker[1, 1](mark)
            subject.run(used)
            torch.cuda.synchronize()
            profiler.stop()


if __name__ == "__main__":
    _call_all(tuple(sys.argv[1:]))
