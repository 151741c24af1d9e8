"""Tables of the ladder in markdown, out of the results files.

ladder-machine.json    plan and trace of every rung, from benchmarks/ladder_machine.py
ladder-<gpu>.json      times of every rung on a GPU, from benchmarks/ladder_gpu.py
ladder-vs-<gpu>.json   the machine's counts against Nsight Compute, from benchmarks/ladder_vs_gpu.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.ladder import RUNGS
from lockstep.ladder.tables import duration, kilobytes, megabytes, number

Run = dict[str, Any]


def blocks() -> dict[str, Callable[[Path], str]]:
    """What stands between `<!-- bench:NAME -->` markers, by name."""
    per_rung = {f"rung_{rung.name}": _rung_block(rung.name) for rung in RUNGS}
    return {"ladder": gpu_block, "ladder_counters": counters_block, **per_rung}


def gpu_block(directory: Path) -> str:
    """Times of every rung and its peers, one column per problem; the newest run on a GPU."""
    run = _newest("ladder", directory)
    if run is None:
        return "Not measured yet."
    shapes = list(dict.fromkeys(row["shape"] for row in run["rows"]))
    times = {(row["kernel"], row["shape"]): row["microseconds"] for row in run["rows"]}
    names = list(dict.fromkeys(row["kernel"] for row in run["rows"]))
    oblivious = {row["kernel"] for row in run["rows"] if row.get("constant_time")}
    lines = [
        f"| | {' | '.join(shape.replace(' float16', '') for shape in shapes)} |",
        "|---|" + "---:|" * len(shapes),
    ]
    for name in names:
        cells = (_time(times.get((name, shape))) for shape in shapes)
        title = f"{name}, constant-time" if name in oblivious else name
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\nfp16, {where(run)}."


def _rung_block(name: str) -> Callable[[Path], str]:
    def block(directory: Path) -> str:
        """Plan, trace and time of one rung, a line per variant."""
        counted = _newest("ladder-machine", directory)
        if counted is None:
            return "Not counted yet."
        timed = _newest("ladder", directory)
        rows = [row for row in counted["rows"] if row["rung"] == name]
        lines = [
            "| | blocks | KB shared | occupancy | depth | active lanes | MB moved | conflicts "
            "| barriers | time |",
            "|---|" + "---:|" * 9,
        ]
        lines += [_rung_line(row, counted, timed) for row in rows]
        return "\n".join(lines)

    return block


def _rung_line(row: dict[str, Any], counted: Run, timed: Run | None) -> str:
    launches, seen = row["plan"]["launches"], row["trace_of_one_head"]
    wavefronts = seen["shared_wavefronts"]
    cells = (
        row["title"],
        number(sum(launch["blocks"] for launch in launches)),
        kilobytes(max(launch["shared_bytes"] for launch in launches)),
        f"{min(launch['occupancy'] for launch in launches):.0%}",
        number(seen["depth"]),
        f"{seen['active_lanes']:.1f}",
        megabytes(seen["global_bytes"] * counted["heads"]),
        f"{seen['bank_conflicts'] / wavefronts:.0%}" if wavefronts else "–",
        f"{seen['barriers_per_block']:.0f}",
        _time(_first_time(timed, row["title"])),
    )
    return f"| {' | '.join(cells)} |"


def _first_time(run: Run | None, title: str) -> float | None:
    """Of the first problem that was timed."""
    rows = run["rows"] if run else ()
    return next((row["microseconds"] for row in rows if row["kernel"] == title), None)


def counters_block(directory: Path) -> str:
    """Sectors and wavefronts of every launch: the machine's, and Nsight Compute's if different."""
    run = _newest("ladder-vs-gpu", directory)
    if run is None:
        return "Not measured yet."
    lines = [
        "| launch | outputs | global sectors | shared wavefronts | blocks/SM | why they differ |",
        "|---|---|---:|---:|---:|---|",
    ]
    for row in run["rows"]:
        machine, gpu = row["machine"], row["gpu"]
        same = "same bits" if row["bitwise"] else f"within {row['largest_error']:.0e}"
        pairs = [
            _pair(machine[name], gpu[name]) for name in ("global_sectors", "shared_wavefronts")
        ]
        fits = _pair(row["blocks_per_sm"]["closed_form"], row["blocks_per_sm"]["driver"])
        why = _why(row)
        lines.append(f"| {row['name']} | {same} | {' | '.join(pairs)} | {fits} | {why} |")
    return "\n".join(lines) + f"\n\n{where(run)}."


def _why(row: dict[str, Any]) -> str:
    """Why counts differ, as far as it is known."""
    verdicts = {row["global_sectors_verdict"], row["shared_wavefronts_verdict"]} - {"equal"}
    reasons = {
        "merged": "the compiler merges accesses",
        "known": row["known_difference"],
        "differs": "not known",
    }
    return "; ".join(reasons[verdict] for verdict in sorted(verdicts))


def _pair(ours: int, theirs: int) -> str:
    return f"{ours:,}" if ours == theirs else f"{ours:,} / {theirs:,}"


def _time(microseconds: float | None) -> str:
    return "–" if microseconds is None else duration(microseconds)


def _newest(suite: str, directory: Path) -> Run | None:
    paths = directory.glob("ladder*.json")
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    runs = [run for run in found if run["suite"] == suite]
    return max(runs, key=lambda run: run["date"], default=None)


def where(run: Run) -> str:
    """On what GPU, with which versions, when and at which commit a run was measured."""
    env = run["environment"]
    versions, commit = env["versions"], env["commit"]
    parts = [", ".join(env["hardware"]["gpus"]), f"torch {versions['torch']}", run["date"]]
    if commit and commit.get("hash"):
        parts.append(f"commit {commit['hash'][:7]}")
    return ", ".join(parts)
