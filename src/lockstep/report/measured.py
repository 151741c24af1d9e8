"""Measured data from results files: times of rungs and of their phases, the roofline, peers,
audits."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.bench import gpu_tables
from lockstep.ladder import Problem, find
from lockstep.ladder.plan import PEAKS, Plan, Step
from lockstep.ladder.rung import BYTES, plans_of
from lockstep.output import results
from lockstep.simt.occupancy import fit

from . import GPU

Data = dict[str, Any]


def rung_times(directory: Path | None) -> list[Data]:
    """The newest run of the ladder on a GPU: one entry per problem, times by rung in µs."""
    run = _newest("ladder", directory)
    shapes: dict[str, Data] = {}
    for row in run["rows"] if run else []:
        entry = shapes.setdefault(row["shape"], {"shape": row["shape"], "times": {}})
        if row["microseconds"]:
            entry["times"][row["kernel"]] = row["microseconds"]
    where = results.where_on_gpu(run) if run else ""
    return [{**entry, "where": where} for entry in shapes.values()]


def rung_counts(directory: Path | None) -> Data | None:
    """The newest counts of the machine for a problem as large as those that are timed: by rung,
    and with the occupancy of its plan. None where there are no such results."""
    run = _newest("ladder-machine", directory)
    if run is None:
        return None
    rows = {
        row["title"]: {
            **row["trace_of_one_head"],
            "occupancy": min(launch["occupancy"] for launch in row["plan"]["launches"]),
        }
        for row in run["rows"]
        if row["trace_of_one_head"] and row["plan"]
    }
    return {"problem": run["problem"], "heads": run["heads"], "rows": rows}


def phase_times(directory: Path | None) -> list[Data]:
    """Where the time of rungs goes, by clock reads around their phases: an entry per problem, with
    shares of time by phase and the time in µs as it is and with the clock reads."""
    run = _newest("ladder-phases", directory)
    shapes: dict[str, Data] = {}
    for row in run["rows"] if run else []:
        entry = shapes.setdefault(row["shape"], {"shape": row["shape"], "rows": []})
        shares = {**row["phases"], "(outside)": row["outside"]}
        times = {key: row[key] for key in ("microseconds", "instrumented_microseconds")}
        entry["rows"].append({"title": row["kernel"], "shares": shares, **times})
    where = results.where_on_gpu(run) if run else ""
    return [{**entry, "where": where} for entry in shapes.values()]


def roofline(directory: Path | None) -> Data:
    """Points of measured kernels: operations per byte, and TFLOP/s."""
    peak = PEAKS[GPU]
    points = [*_rung_points(directory), *_production_points(directory)]
    roofs = {"bandwidth": peak.bandwidth, "fp32": peak.fp32, "tensor": peak.tensor}
    return {"gpu": GPU, **roofs, "points": points}


def _rung_points(directory: Path | None) -> Iterable[Data]:
    """Rungs as the suite `ladder` timed them. Bytes are those that the plan asks of global memory,
    of which caches serve a part; for others in the same run, the least there is."""
    run = _newest("ladder", directory)
    for row in run["rows"] if run else []:
        if not row["microseconds"]:
            continue
        problem = Problem(**row["problem"])
        least = 4 * problem.rows * problem.D * BYTES
        bytes_moved = least
        ours = "rung" in row and row["rung"]
        if ours:
            try:
                bytes_moved = _planned_bytes(row, problem)
            except ValueError:  # the rung or its options are no longer as they were measured
                continue
        operations = row["tflops"] * row["microseconds"] * 1e6
        yield {
            "name": row["kernel"],
            "group": "rung" if ours else "others",
            "case": row["shape"],
            "intensity": operations / bytes_moved,
            "tflops": row["tflops"],
        }


def _planned_bytes(row: Data, problem: Problem) -> int:
    rung = find(row["rung"]).choose(**row["options"])
    steps = tuple(
        Step(launch, fit(GPU, launch.block, 0, launch.shared_bytes), registers_known=False)
        for launch in plans_of(rung, problem)
    )
    return Plan(rung, problem, GPU, steps).traffic


def _production_points(directory: Path | None) -> Iterable[Data]:
    """Forward passes of the GPU bench. Bytes are the least: q, k, v in, out back, once each."""
    for table in peers(directory):
        for row in table["rows"] if table["table"] == "forward" else []:
            tokens = row["B"] * row["S"] * row["D"]
            least = 2 * tokens * (row["Hq"] + row["Hkv"]) * BYTES
            operations = 4 * row["Hq"] * tokens * row["S"] / (2 if row["causal"] else 1)
            for name, rate in row["rate"].items():
                yield {
                    "name": name,
                    "group": "Lockstep" if name in row["ours"] else "others",
                    "case": row["case"],
                    "intensity": operations / least,
                    "tflops": rate,
                }


def peers(directory: Path | None) -> list[Data]:
    """Tables of the GPU bench, each from the newest run that has it."""
    found = []
    for runs in gpu_tables.current(directory) if directory else []:
        for run in runs:
            tables = dict.fromkeys(row["table"] for row in run["rows"])
            for name in tables:
                rows = gpu_tables.in_order(r for r in run["rows"] if r["table"] == name)
                where = results.where(run)
                found.append({"table": name, "where": where, "rows": [_peer_row(r) for r in rows]})
    return found


def _peer_row(row: Data) -> Data:
    names = ("table", "case", "unit", "B", "Hq", "Hkv", "S", "D", "causal", "ours", "chosen")
    kept = {name: row[name] for name in names}
    return kept | {"rate": row["rate"], "best_peer": row["best_peer"], "speed": row["speed"]}


def audits(directory: Path | None, files: Iterable[Path]) -> Data:
    """Bits: machine against GPU where a run exists, and what `lockstep audit ... --json` printed
    into `files`.

    Raises ValueError for a file that is no such result.
    """
    runs = [_newest(suite, directory) for suite in ("ladder-vs-gpu", "simt-vs-gpu")]
    machine = [
        {
            "where": results.where_on_gpu(run),
            "rows": [
                {
                    key: row.get(key)
                    for key in ("name", "bitwise", "largest_error", "why", "hazards")
                }
                for row in run["rows"]
            ],
        }
        for run in runs
        if run
    ]
    return {"machine": machine, "files": [_audit(path) for path in files]}


def _audit(path: Path) -> Data:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"--audit takes a JSON file, got '{path}': {error}") from None
    if not isinstance(found, dict) or "checks" not in found:
        raise ValueError(f"--audit takes what `lockstep audit bits --json` prints, got '{path}'")
    return {"file": path.name, "shape": found.get("shape", {}), "ok": found.get("ok"),
            "checks": found["checks"]}  # fmt: skip


def _newest(suite: str, directory: Path | None) -> Data | None:
    return results.newest(suite, directory) if directory else None
