"""The functions whose lines a trace counts: their whole source, once per report."""

from __future__ import annotations

import ast
import linecache
from functools import cache
from pathlib import Path
from typing import Any

from lockstep.simt.machine.records.trace import Line, Trace


@cache
def _functions(file: str) -> tuple[tuple[str, int, int], ...]:
    """Name, first and last line of every function of a file, decorators included."""
    tree = ast.parse("".join(linecache.getlines(file)))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            found.append((node.name, first, node.end_lineno or node.lineno))
    return tuple(found)


def enclosing(file: str, line: int) -> tuple[str, int, int]:
    """The innermost function around a line, or the line by itself."""
    around = [f for f in _functions(file) if f[1] <= line <= f[2]]
    return max(around, key=lambda f: f[1], default=("", line, line))


def listing(trace: Trace, sources: dict[str, Any]) -> list[dict[str, Any]]:
    """Functions with the counts of their executed lines, the kernel first.

    Source goes into `sources`, by file and name, so that traces of one kernel share it.
    """
    by_function: dict[tuple[str, str, int, int], list[Line]] = {}
    kernel = (trace.file, *enclosing(trace.file, trace.first_line))
    by_function[kernel] = []
    for line in trace.lines:
        key = (line.file, *enclosing(line.file, line.number))
        by_function.setdefault(key, []).append(line)
    hazards: dict[tuple[str, int], list[str]] = {}
    for hazard in trace.hazards:
        hazards.setdefault((hazard.loc.file, hazard.loc.line), []).append(str(hazard))
    found = []
    for (file, name, first, last), lines in by_function.items():
        key = f"{Path(file).name}:{name}:{first}"
        if key not in sources:
            text = [linecache.getline(file, n).rstrip("\n") for n in range(first, last + 1)]
            sources[key] = {"file": Path(file).name, "name": name, "first": first, "lines": text}
        counts = {line.number: _counts(line) for line in lines}
        for (where, number), texts in hazards.items():
            if where == file and first <= number <= last:
                counts.setdefault(number, {})["hazards"] = texts
        found.append({"source": key, "lines": counts})
    return found


def _counts(line: Line) -> dict[str, Any]:
    """The counts of a line that the page shows; zeros are left out."""
    counts = line.counts
    shown = {
        "executions": line.executions,
        "instructions": counts.instructions,
        "lanes": round(counts.active_lanes, 1),
        "wavefronts": counts.shared_wavefronts,
        "conflicts": counts.bank_conflicts,
        "sectors": counts.global_sectors,
        "wasted": counts.global_sectors - counts.ideal_sectors,
        "divergent": counts.divergent_branches,
    }
    return {name: value for name, value in shown.items() if value}
