"""What a GPU counts while a call runs: the same for all secrets, to the last one?

Nsight Compute (`ncu`) runs this module as a program that calls every subject on secrets of every
class, and reads the counters of each kernel. An empty kernel, `marker`, goes before each call.
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.audit.timing import subjects
from lockstep.audit.timing.gpu_leaks import marker
from lockstep.audit.timing.subjects import Secrets, Subject

METRICS = {
    "instructions": "smsp__inst_executed",
    "thread instructions": "smsp__thread_inst_executed",
    "branches": "smsp__inst_executed_op_branch",
    "branch pipe": "smsp__inst_executed_pipe_cbu",
    "uniform branches": "smsp__branch_targets_threads_uniform",
    "divergent branches": "smsp__branch_targets_threads_divergent",
    **{
        f"{what} {op}": f"l1tex__t_{what}_pipe_lsu_mem_global_op_{op}"
        for what in ("requests", "sectors")
        for op in ("ld", "st")
    },
    "shared wavefronts": "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared",
    "sectors of L2": "lts__t_sectors_srcunit_tex",
}
RANDOM = "random"


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
        *("--profile-from-start", "off", "--metrics", ",".join(metrics.values())),
        *(sys.executable, "-m", __name__, *groups),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or '"ID"' not in done.stdout:
        raise RuntimeError(f"ncu failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    calls = [(s.name, name) for s in chosen(groups) for name in classes_of(s)]
    launches = _launches(done.stdout, {name: key for key, name in metrics.items()})
    found: list[Counts] = []
    for name, values in launches:
        if name == "marker":
            subject, secrets = calls[len(found)]
            found.append(Counts(subject, secrets, (), ()))
        else:
            last = found[-1]
            kernels, all_values = (*last.kernels, name), (*last.values, values)
            found[-1] = Counts(last.subject, last.secrets, kernels, all_values)
    if len(found) != len(calls):
        raise RuntimeError(f"ncu saw {len(found)} calls of {len(calls)}")
    return found


def differing(groups: tuple[str, ...]) -> dict[str, list[str]]:
    """By subject, what differs from the counters of random secrets: "zeros: attend: ..."."""
    found: dict[str, list[str]] = {}
    base: dict[str, Counts] = {}
    for counts in count(groups):
        first = base.setdefault(counts.subject, counts)
        lines = [f"{counts.secrets}: {line}" for line in differences(first, counts)]
        found.setdefault(counts.subject, []).extend(lines)
    return found


def differences(base: Counts, other: Counts) -> list[str]:
    """What differs between two calls: "kernel: counter 12 -> 14"."""
    if base.kernels != other.kernels:
        return [f"kernels {base.kernels} -> {other.kernels}"]
    return [
        f"{kernel}: {key} {x[key]:.0f} -> {y[key]:.0f}"
        for kernel, x, y in zip(base.kernels, base.values, other.values, strict=True)
        for key in x
        if x[key] != y[key]
    ]


def _known_metrics() -> dict[str, str]:
    """Those of METRICS that this GPU has."""
    command = ["ncu", "--query-metrics"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    return {short: f"{name}.sum" for short, name in METRICS.items() if name in names}


def _launches(text: str, short: dict[str, str]) -> list[tuple[str, dict[str, float]]]:
    """The name of each kernel, and what was counted."""
    found: dict[int, tuple[str, dict[str, float]]] = {}
    for record in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        _, values = found.setdefault(int(record["ID"]), (record["Kernel Name"], {}))
        value = record["Metric Value"].replace(",", "")
        values[short[record["Metric Name"]]] = float(value) if value not in ("", "n/a") else 0.0
    return [found[i] for i in sorted(found)]


def chosen(groups: tuple[str, ...]) -> list[Subject]:
    """The subjects of these groups."""
    makers = {"kernels": subjects.kernels, "rungs": subjects.rungs, "leaks": subjects.leaks}
    return [subject for group in groups for subject in makers[group]()]


def classes_of(subject: Subject) -> tuple[str, ...]:
    return (RANDOM, "random again", *subject.fixes, *subject.number_fixes)


def _secrets(subject: Subject) -> Iterator[Secrets]:
    """Of each class, in the order of `classes_of`."""
    generator = torch.Generator().manual_seed(0)
    yield subject.draw(generator)
    yield subject.draw(generator)
    for fix in (*subject.fixes.values(), *subject.number_fixes.values()):
        yield fix(subject.draw(generator))


def _call_all(groups: tuple[str, ...]) -> None:
    """Under Nsight Compute: each subject on secrets of each class, in the same memory."""
    profiler: Any = torch.cuda.profiler
    mark = torch.zeros(1, device="cuda")
    for subject in chosen(groups):
        buffers: Secrets = {}
        for secrets in _secrets(subject):
            for name, x in secrets.items():
                on_gpu = buffers.setdefault(name, x.cuda() if x.dim() else x.clone())
                on_gpu.copy_(x)
            used = {name: buffers[name] for name in secrets}
            subject.run(used)
            torch.cuda.synchronize()
            profiler.start()
            marker[1, 1](mark)
            subject.run(used)
            torch.cuda.synchronize()
            profiler.stop()


if __name__ == "__main__":
    _call_all(tuple(sys.argv[1:]))
