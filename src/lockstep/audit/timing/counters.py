"""Counters of a GPU while a call runs, which must be the same for all secrets.

Nsight Compute (`ncu`) runs this module as a program that calls every subject on secrets of every
class, and reads how often each instruction of each kernel was executed, and what it accessed. An
empty kernel, `marker`, goes before each subject.
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.audit.timing import subjects
from lockstep.audit.timing.gpu_leaks import marker
from lockstep.audit.timing.subjects import Secrets, Subject
from lockstep.kernels.launch import compiled_kernels
from lockstep.simt.taint.code import read_code
from lockstep.simt.taint.waits import polls_memory, wait_loops

_SHARED = "l1tex_data_pipe_lsu_wavefronts_mem_shared"
# Accesses to memory, by short names.
METRICS = {
    **{f"sectors {op}": f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}.sum" for op in ("ld", "st")},
    **{f"shared wavefronts {op}": f"smsp__sass_{_SHARED}_op_{op}.sum" for op in ("ld", "st")},
}
# Counts of each instruction: how often warps executed it, how often their threads did, and how many
# sectors of global memory the addresses lie in that they gave it.
EXECUTED = {
    "warps": "inst_executed",
    "threads": "thread_inst_executed",
    "sectors": "memory_l2_theoretical_sectors_global",
}
# A counter of all instructions together. It has those that wait, if these read memory.
WITH_POLLS = "sectors ld"
RANDOM, AGAIN = "random", "random, again"
csv.field_size_limit(1 << 28)


@dataclass(frozen=True)
class Launch:
    """A kernel that ran: counters by short name, and of each instruction, by kind of EXECUTED."""

    kernel: str
    counters: dict[str, float]
    executed: dict[str, list[int]]

    @property
    def code(self) -> tuple[str, int]:
        """What tells its machine code from that of other kernels."""
        return self.kernel, len(self.executed["warps"])

    def total(self, kind: str, waits: Collection[int] = ()) -> int:
        return sum(n for i, n in enumerate(self.executed[kind]) if i not in waits)


@dataclass(frozen=True)
class Counts:
    """The kernels of one call, in the order of their launches."""

    subject: str
    secrets: str
    launches: tuple[Launch, ...]


@dataclass(frozen=True)
class Report:
    """Calls, and by kernel and number of instructions those that wait for others, and whether any
    of them reads memory."""

    calls: list[Counts]
    waits: dict[tuple[str, int], frozenset[int]]
    polls: frozenset[tuple[str, int]] = frozenset()

    def waits_of(self, launch: Launch) -> frozenset[int]:
        return self.waits.get(launch.code, frozenset())


def is_available() -> bool:
    return shutil.which("ncu") is not None


def count(group: str, only: Collection[str] = ()) -> Report:
    """Counters of the subjects of a group, "kernels", "rungs" or "leaks", class by class; of those
    called `only`, if any are.

    Raises RuntimeError where Nsight Compute fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        waits = Path(folder) / "waits.json"
        command = [
            *("ncu", "--csv", "--print-units", "base"),
            *("--clock-control", "none", "--cache-control", "none"),
            *("--print-metric-instances", "details", "--profile-from-start", "off"),
            *("--metrics", ",".join([*EXECUTED.values(), *METRICS.values()])),
            *(sys.executable, "-m", __name__, str(waits), group, *only),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or '"ID"' not in done.stdout:
            raise RuntimeError(f"ncu failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
        found = json.loads(waits.read_text(encoding="utf-8"))
    return Report(
        list(calls(read(done.stdout), chosen((group,), only))),
        {(name, n): frozenset(places) for name, n, places, _ in found},
        frozenset((name, n) for name, n, _, is_poll in found if is_poll),
    )


def read(text: str) -> list[Launch]:
    """The kernels of a report."""
    short = {name: key for key, name in METRICS.items()}
    kinds = {name: kind for kind, name in EXECUTED.items()}
    found: dict[int, Launch] = {}
    by_address: dict[int, dict[str, dict[str, int]]] = {}
    for record in csv.DictReader(io.StringIO(text[text.index('"ID"') :])):
        launch = found.setdefault(int(record["ID"]), Launch(record["Kernel Name"], {}, {}))
        name = record["Metric Name"]
        # "12", or with instances by address "12 (0x7f10: 2; 0x7f20: 10)".
        total, _, instances = record["Metric Value"].partition("(")
        if name in kinds:
            each = [x.rpartition(":") for x in instances.rstrip(") ").split(";")]
            counts = {at.strip(): int(_number(n)) for at, _, n in each if at}
            by_address.setdefault(int(record["ID"]), {})[kinds[name]] = counts
        else:
            launch.counters[short[name]] = _number(total)
    for i, counted in by_address.items():
        # Only instructions that access memory have sectors.
        places = counted["warps"]
        for kind, counts in counted.items():
            found[i].executed[kind] = [counts.get(at, 0) for at in places]
    return [found[i] for i in sorted(found)]


def _number(text: str) -> float:
    text = text.replace(",", "").strip()
    return float(text) if text not in ("", "n/a") else 0.0


def calls(launches: Iterable[Launch], of: Iterable[Subject]) -> Iterator[Counts]:
    """Launches by subject and class: after a marker, as many for each class.

    Raises RuntimeError where that is not so.
    """
    by_subject: list[list[Launch]] = []
    for launch in launches:
        if launch.kernel.startswith("marker"):
            by_subject.append([])
        else:
            by_subject[-1].append(launch)
    for subject, mine in zip(of, by_subject, strict=True):
        names = classes_of(subject)
        each, left = divmod(len(mine), len(names))
        if left or not each:
            raise RuntimeError(f"{subject.name}: {len(mine)} launches for {len(names)} calls")
        for i, name in enumerate(names):
            yield Counts(subject.name, name, tuple(mine[i * each : (i + 1) * each]))


def differing(report: Report) -> dict[str, list[str]]:
    """Differences from the counters of random secrets, by subject: "zeros: attend: ..."."""
    found: dict[str, list[str]] = {}
    base: dict[str, Counts] = {}
    for counts in report.calls:
        first = base.setdefault(counts.subject, counts)
        lines = [f"{counts.secrets}: {line}" for line in differences(report, first, counts)]
        found.setdefault(counts.subject, []).extend(lines)
    return found


def differences(report: Report, base: Counts, other: Counts) -> Iterator[str]:
    """Differences between two calls, without instructions that wait: "kernel: counter 12 -> 14".

    How often a loop repeats that waits depends on time alone.
    """
    for x, y in zip(base.launches, other.launches, strict=True):
        if x.kernel != y.kernel:
            yield f"{x.kernel} -> {y.kernel}"
            continue
        for key in x.counters:
            if key == WITH_POLLS and x.code in report.polls:
                continue  # the sectors of each instruction are compared
            if x.counters[key] != y.counters[key]:
                yield f"{x.kernel}: {key} {x.counters[key]:.0f} -> {y.counters[key]:.0f}"
        waits = report.waits_of(x)
        for kind, of in x.executed.items():
            both = enumerate(zip(of, y.executed[kind], strict=True))
            wrong = [(i, n, m) for i, (n, m) in both if n != m and i not in waits]
            if wrong:
                i, n, m = wrong[0]
                more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
                yield f"{x.kernel}: {kind} at instruction {i} {n} -> {m}{more}"


def chosen(groups: tuple[str, ...], only: Collection[str] = ()) -> list[Subject]:
    """The subjects of these groups; of those called `only`, if any are."""
    makers = {"kernels": subjects.kernels, "rungs": subjects.rungs, "leaks": subjects.leaks}
    found = (subject for group in groups for subject in makers[group]())
    return [subject for subject in found if not only or subject.name in only]


def classes_of(subject: Subject) -> tuple[str, ...]:
    return (RANDOM, AGAIN, "other random", *subject.fixes, *subject.number_fixes)


def _secrets(subject: Subject) -> Iterator[Secrets]:
    """Secrets of each class, in the order of `classes_of`."""
    generator = torch.Generator().manual_seed(0)
    first = subject.draw(generator)
    yield from (first, first, subject.draw(generator))
    for fix in (*subject.fixes.values(), *subject.number_fixes.values()):
        yield fix(subject.draw(generator))


def _call_all(of: list[Subject]) -> None:
    """Call each subject on secrets of each class, in the same memory; this runs under Nsight
    Compute."""
    profiler: Any = torch.cuda.profiler
    mark = torch.zeros(1, device="cuda")
    for subject in of:
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


def _waits() -> Iterator[tuple[str, int, list[int], bool]]:
    """For each kernel that Triton compiled: its name, its number of instructions, those that wait,
    and whether they read memory."""
    for compiled in compiled_kernels():
        code = read_code(compiled.asm["cubin"])
        # A report may leave out what fills the memory after a kernel: a jump to itself, and NOPs.
        n = len(code.instructions)
        while code.instructions[n - 1].name == "NOP":
            n -= 1
        waits, is_poll = sorted(wait_loops(code)), polls_memory(code)
        for length in range(n - 1, len(code.instructions) + 1):
            yield compiled.name, length, waits, is_poll


def main() -> None:
    waits, group, *only = sys.argv[1:]
    _call_all(chosen((group,), only))
    Path(waits).write_text(json.dumps(list(_waits())), encoding="utf-8")


if __name__ == "__main__":
    main()
