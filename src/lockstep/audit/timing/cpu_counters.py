"""Counters of the kernels of a CPU call, which must be the same for all secrets.

Valgrind's callgrind counts while the programs of `replay.py` run their kernel: instructions, loads
and stores, branches; and it follows each access through a small cache, and each branch through a
predictor. Whether an access misses that cache depends on its address and on those before it, so
another sequence of addresses shows in the misses, though not every one has to. Counters of the
processor would be off by interrupts, and are not there in many virtual machines.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path

import torch
from torch import Tensor

from lockstep.audit.timing import replay
from lockstep.audit.timing.clock import Draw, Fixes, Secrets
from lockstep.audit.timing.memcheck import run_program

# Bytes, ways and bytes of a line. The first level has few lines: most accesses get in each other's
# way.
_CACHES = ("--I1=4096,2,64", "--D1=2048,2,64", "--LL=65536,4,64")
# Conditional branches, and jumps to an address in a register.
NAMES = {
    "Ir": "instructions",
    "Dr": "loads",
    "Dw": "stores",
    "I1mr": "instruction misses",
    "D1mr": "load misses",
    "D1mw": "store misses",
    "Bc": "branches",
    "Bcm": "mispredicted branches",
    "Bi": "indirect jumps",
    "Bim": "mispredicted indirect jumps",
}
RANDOM = "random"
Counts = dict[str, int]


def differing(counts: dict[str, dict[str, Counts]]) -> Iterator[str]:
    """Differences from random secrets: "zeros: 0 units.plan: instructions 12 -> 14"."""
    for name, found in counts.items():
        for kernel, base in counts[RANDOM].items():
            for key, n in base.items():
                if found[kernel][key] != n:
                    yield f"{name}: {kernel}: {key} {n} -> {found[kernel][key]}"


def count(
    run: Callable[[Secrets], Tensor], draw: Draw, fixes: Fixes
) -> dict[str, dict[str, Counts]]:
    """The counters of each kernel of a call, by class of secrets and by number and name.

    Each class has the memory of the first in the same places, apart from secret tensors. Raises
    RuntimeError where a program fails, or where a class has other kernels.
    """
    generator = torch.Generator().manual_seed(0)
    base = replay.record(partial(run, draw(generator)))
    calls = {RANDOM: base}
    for name, fix in fixes.items():
        calls[name] = replay.record(partial(run, fix(draw(generator))))
    counts: dict[str, dict[str, Counts]] = {name: {} for name in calls}
    for i, first in enumerate(base):
        with tempfile.TemporaryDirectory() as folder:
            replay.build(first, Path(folder))
            for name, recorded in calls.items():
                replay.write_memory(first.with_secrets_of(recorded[i]), Path(folder))
                counts[name][f"{i} {first.kernel.name}"] = _count(Path(folder))
    return counts


def _count(folder: Path) -> Counts:
    report = folder / "counts"
    options = ["--collect-atstart=no", "--cache-sim=yes", "--branch-sim=yes", *_CACHES]
    options.append(f"--callgrind-out-file={report}")
    run_program(["valgrind", "--tool=callgrind", *options, *replay.RUN], folder)
    return read(report.read_text(encoding="utf-8"))


def read(text: str) -> Counts:
    """The counters in a file that callgrind wrote."""
    fields = dict(line.partition(": ")[::2] for line in text.splitlines() if ": " in line)
    names, numbers = fields["events"].split(), fields["totals"].split()
    # Zeros at the end are left out. Misses of the last level depend on what ran before the kernel.
    counts = dict(zip_longest(names, numbers, fillvalue="0"))
    return {NAMES[name]: int(n) for name, n in counts.items() if name in NAMES}
