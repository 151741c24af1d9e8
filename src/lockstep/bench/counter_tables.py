"""Tables of the machine's counts against Nsight Compute's, in markdown, out of the results files.

simt-vs-<gpu>.json     the samples of `lockstep.simt`, from benchmarks/simt_vs_gpu.py
ladder-vs-<gpu>.json   the rungs of the ladder, from benchmarks/ladder_vs_gpu.py
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep.output import results

Run = dict[str, Any]
COUNTS = ("global_requests", "global_sectors", "shared_wavefronts")


def agreement_block(directory: Path) -> str:
    """The number of samples on which machine and GPU agree, and the counts of the others."""
    run = results.newest("simt-vs-gpu", directory)
    if run is None:
        return results.NOT_MEASURED
    rows = run["rows"]
    rounded = [row["largest_error"] for row in rows if not row["bitwise"]]
    fits = [row["blocks_per_sm"] for row in rows]
    lines = [
        "| | kernels |",
        "|---|---:|",
        _share("outputs equal, bit for bit", len(rows) - len(rounded), rows),
        _share(f"outputs within {max(rounded, default=0.0):.1e}", len(rounded), rows),
    ]
    for count in COUNTS:
        equal = sum(row["machine"][count] == row["gpu"][count] for row in rows)
        lines.append(_share(f"{count.replace('_', ' ')} equal", equal, rows))
    as_driver = sum(fit["closed_form"] == fit["driver"] for fit in fits)
    lines.append(_share("blocks per multiprocessor as the driver says", as_driver, rows))
    others = [row for row in rows if any(row[f"{count}_verdict"] != "equal" for count in COUNTS)]
    table = _counters_table({**run, "rows": others})
    return "\n".join(lines) + f"\n\nWhere counts differ, machine / GPU:\n\n{table}"


def _share(what: str, n: int, rows: list[dict[str, Any]]) -> str:
    return f"| {what} | {n} of {len(rows)} |"


def counters_block(suite: str) -> Callable[[Path], str]:
    """Sectors and wavefronts of every launch: the machine's, and Nsight Compute's if different."""

    def block(directory: Path) -> str:
        run = results.newest(suite, directory)
        return results.NOT_MEASURED if run is None else _counters_table(run)

    return block


def _counters_table(run: Run) -> str:
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
    return "\n".join(lines) + f"\n\n{results.where_on_gpu(run)}."


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
