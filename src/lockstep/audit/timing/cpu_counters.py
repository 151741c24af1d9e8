"""What the kernels of a CPU call execute: the same for all secrets, to the last instruction?

Valgrind's lackey counts while the programs of `replay.py` run: instructions, conditional branches
and those taken, loads and stores by size. Counters of the processor would be off by interrupts, and
are not there in many virtual machines. What it does not see: which addresses are touched.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from lockstep.audit.timing import replay
from lockstep.audit.timing.clock import Draw, Fixes, Secrets
from lockstep.audit.timing.memcheck import run_program
from lockstep.audit.timing.replay import Recorded

_COUNT = re.compile(r"==\d+== +(total|taken|guest instrs): +([\d,]+)")
_BY_TYPE = re.compile(r"==\d+== +([IFVD]\d+) +([\d,]+) +([\d,]+) +[\d,]+$", re.MULTILINE)
NAMES = {"total": "branches", "taken": "branches taken", "guest instrs": "instructions"}
Counts = dict[str, int]
# Now and then a program has 3 branches more before it comes to its kernel; the least counts.
REPEATS = 3


def differing(run: Callable[[Secrets], Tensor], draw: Draw, fixes: Fixes) -> Iterator[str]:
    """What differs from the counts of random secrets: "zeros: kernel: instructions 12 -> 14".

    Raises RuntimeError where a program fails.
    """
    generator = torch.Generator().manual_seed(0)
    base = count(partial(run, draw(generator)))
    for name, fix in fixes.items():
        for (kernel, x), (other, y) in zip(
            base, count(partial(run, fix(draw(generator)))), strict=True
        ):
            if kernel != other:
                yield f"{name}: {kernel} -> {other}"
            for key in x:
                if x[key] != y[key]:
                    yield f"{name}: {kernel}: {key} {x[key]} -> {y[key]}"


def count(run: Callable[[], Tensor]) -> list[tuple[str, Counts]]:
    """The kernels of a call, and what each of them executes."""
    return [(recorded.kernel.name, _count(recorded)) for recorded in replay.record(run)]


def _count(recorded: Recorded) -> Counts:
    """What the kernel executes: the program with it, less the program without it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        replay.build(recorded, folder)
        report = folder / "counts"
        options = ["--basic-counts=yes", "--detailed-counts=yes", f"--log-file={report}"]
        found = []
        for program in (replay.RUN, replay.RUN_WITHOUT):
            counts = []
            for _ in range(REPEATS):
                run_program(["valgrind", "--tool=lackey", *options, *program], folder)
                counts.append(read(report.read_text(encoding="utf-8")))
            found.append({key: min(each[key] for each in counts) for key in counts[0]})
        return {key: found[0][key] - found[1][key] for key in found[0]}


def read(text: str) -> Counts:
    """What lackey wrote."""
    found = {NAMES[name]: _number(n) for name, n in _COUNT.findall(text)}
    for kind, loads, stores in _BY_TYPE.findall(text):
        found |= {f"loads {kind}": _number(loads), f"stores {kind}": _number(stores)}
    return found


def _number(text: str) -> int:
    return int(text.replace(",", ""))
