"""Tables of the ladder in markdown, out of the results files.

ladder-machine.json    plan and trace of every rung, from benchmarks/ladder_machine.py
ladder-<gpu>.json      times of every rung on a GPU, from benchmarks/ladder_gpu.py
ladder-vs-<gpu>.json   the machine's counts against Nsight Compute: see `counter_tables`
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.bench.counter_tables import counters_block
from lockstep.ladder import RUNGS
from lockstep.output import results
from lockstep.output.formats import duration, kilobytes, megabytes, number

Run = dict[str, Any]


def gpu_block(directory: Path) -> str:
    """Times of every rung and its peers, one column per problem; the newest run on a GPU."""
    run = results.newest("ladder", directory)
    if run is None:
        return results.NOT_MEASURED
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
    return "\n".join(lines) + f"\n\nfp16, {results.where_on_gpu(run)}."


def _rung_block(name: str) -> Callable[[Path], str]:
    def block(directory: Path) -> str:
        """Plan, trace and time of one rung, a line per variant."""
        counted = results.newest("ladder-machine", directory)
        if counted is None:
            return "Not counted yet."
        timed = results.newest("ladder", directory)
        rows = [row for row in counted["rows"] if row["rung"] == name]
        lines = [
            "| | blocks | KB shared | occupancy | depth | active lanes | MB moved | conflicts "
            "| barriers | of warps | time |",
            "|---|" + "---:|" * 10,
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
        f"{seen['warp_barriers_per_warp']:.0f}",
        _time(_time_of(timed, row["title"], counted["problem"])),
    )
    return f"| {' | '.join(cells)} |"


def architecture_block(directory: Path) -> str:
    """One thread per row against one block per tile, stage by stage, on one problem."""
    counted, timed = (results.newest(name, directory) for name in ("ladder-machine", "ladder"))
    found = (counted or {}).get("architecture")
    if found is None or timed is None:
        return results.NOT_MEASURED
    shape = found["problem"]
    lines = [
        f"| {shape.replace(' float16', '')} | depth | barriers | of warps | time "
        "| against a thread per row | against the line above |",
        "|---|" + "---:|" * 6,
    ]
    times: list[float] = []
    for row in found["rows"]:
        time, seen = _time_of(timed, row["title"], shape), row["trace_of_one_head"]
        if time is None:
            return results.NOT_MEASURED
        times.append(time)
        cells = (
            row["title"],
            number(seen["depth"]),
            f"{seen['barriers_per_block']:.0f}",
            f"{seen['warp_barriers_per_warp']:.0f}",
            _time(time),
            f"{times[0] / time:.2f}×",
            f"{times[-2] / time:.2f}×" if len(times) > 1 else "",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\nfp16, {results.where_on_gpu(timed)}."


def _time_of(run: Run | None, title: str, shape: str) -> float | None:
    """The time of a rung on the problem that `shape` describes."""
    rows = run["rows"] if run else ()
    found = (row for row in rows if row["kernel"] == title and row["shape"] == shape)
    return next((row["microseconds"] for row in found), None)


def _time(microseconds: float | None) -> str:
    return duration(None if microseconds is None else microseconds / 1e6)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "ladder": gpu_block,
    "ladder_architecture": architecture_block,
    "ladder_counters": counters_block("ladder-vs-gpu"),
    **{f"rung_{rung.name}": _rung_block(rung.name) for rung in RUNGS},
}
