"""Secrets followed while the CPU kernels run: Valgrind's memcheck, with secrets marked undefined.

Memcheck reports a jump or an address that depends on undefined memory. What it does not see: ways
through the code that a call does not take, and operands that take longer.
"""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from lockstep.audit.timing import replay
from lockstep.audit.timing.replay import Recorded

KINDS = {"UninitCondition": "a branch depends on a secret", "UninitValue": "an address does"}


def findings(run: Callable[[], Any]) -> list[str]:
    """Where secrets reach a branch or an address in the kernels of a call, one line each."""
    return [line for recorded in replay.record(run) for line in check(recorded)]


def check(recorded: Recorded) -> list[str]:
    """The same for one run of a kernel.

    Raises RuntimeError where the program fails, or computes something else than the kernel did.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        program = replay.build(recorded, folder)
        run_program(program, folder)
        if not replay.agrees(recorded, folder):
            raise RuntimeError(f"{recorded.kernel.name}: the program has other results")
        report = folder / "errors.xml"
        options = ["--xml=yes", f"--xml-file={report}", "--num-callers=3"]
        run_program(["valgrind", *options, *program], folder)
        return _read(recorded.kernel.name, report)


def run_program(command: list[str], folder: Path) -> None:
    """Runs a command in a folder. Raises RuntimeError where it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{command[0]} ended with {done.returncode}:\n{done.stderr[-2000:]}")


def _read(kernel: str, report: Path) -> list[str]:
    """Errors inside the kernel and the functions it calls."""
    found = []
    for error in ElementTree.parse(report).getroot().iter("error"):
        kind = error.findtext("kind", "")
        frame = error.find("stack/frame")
        if frame is None or not frame.findtext("obj", "").endswith("/replay"):
            continue
        what = KINDS.get(kind, error.findtext("what", kind))
        found.append(f"{kernel}: {what}: {frame.findtext('ip')} in {frame.findtext('fn', '?')}")
    return found
