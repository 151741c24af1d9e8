"""The summary of a run of `lockstep bench gpu --suite models`: per kind of work, and the worst."""

from __future__ import annotations

from pathlib import Path
from statistics import geometric_mean
from typing import Any

from lockstep.bench.gpu_tables import columns, figure
from lockstep.bench.models.cases import KINDS
from lockstep.bench.models.contender import NAME
from lockstep.output import results

Row = dict[str, Any]
SUITE = "models"
DRAWN = "drawn-cases"
WORST = 5


def summarize(rows: list[Row]) -> dict[str, Any]:
    """Speeds of Lockstep, as multiples of the best peer of each case.

    Returns:
        "kinds": by kind of work `cases` with a peer, their geometric `mean`, the `least`, and how
        many are `below` 1; "worst": the cases with the least speeds, least first.
    """
    kinds = {}
    for kind in KINDS:
        speeds = [row["speed"][NAME] for row in compared(rows) if row["kind"] == kind]
        if speeds:
            kinds[kind] = {
                "cases": len(speeds),
                "mean": round(geometric_mean(speeds), 3),
                "least": min(speeds),
                "below": sum(speed < 1 for speed in speeds),
            }
    worst = sorted(compared(rows), key=lambda row: row["speed"][NAME])[:WORST]
    return {
        "kinds": kinds,
        "worst": [
            {"case": row["case"], "speed": row["speed"][NAME], "best_peer": row["best_peer"]}
            for row in worst
        ],
    }


def compared(rows: list[Row]) -> list[Row]:
    """The rows in which both Lockstep and a peer have a time."""
    return [row for row in rows if NAME in row["speed"]]


def block(directory: Path, suite: str = SUITE) -> str:
    """Markdown for each GPU: each kind of work out of the newest run that has it."""
    pages = [_page(runs) for runs in results.by_processor(suite, directory)]
    return "\n\n".join(pages) or results.NOT_MEASURED


def _page(runs: list[dict[str, Any]]) -> str:
    parts, shown = [], []
    for kind in KINDS:
        for run, rows in latest(kind, runs):
            shown += rows
            caption = " ".join([_caption(run), *absent_peers(kind, run, runs)])
            parts += [_table(kind, rows), caption]
    return "\n\n".join([_means(shown), *parts])


def latest(kind: str, runs: list[dict[str, Any]]) -> list[tuple[dict[str, Any], list[Row]]]:
    """The newest run with this kind of work and its rows; then the run before it, if it has cases
    that the newest left out, with these. Cases of another seed are others, and not left out."""
    having = [run for run in reversed(runs) if of_kind(run, kind)]
    having = [run for run in having if run.get("seed") == having[0].get("seed")]
    found: list[tuple[dict[str, Any], list[Row]]] = []
    seen: set[str] = set()
    for run in having[:2]:
        rows = [row for row in of_kind(run, kind) if row["case"] not in seen]
        if rows:
            found.append((run, rows))
        seen |= {row["case"] for row in rows}
    return found


def absent_peers(kind: str, run: dict[str, Any], runs: list[dict[str, Any]]) -> list[str]:
    """A sentence for each peer that an earlier run had and this one has not: how it stood there
    beside the best of the peers that are in both."""
    latest = {
        name: other
        for other in runs
        for name in other["peers"]
        if name not in run["peers"] and any(name in row["ms"] for row in of_kind(other, kind))
    }
    sentences = []
    for name, other in latest.items():
        speeds = [
            min(others) / row["ms"][name]
            for row in of_kind(other, kind)
            if name in row["ms"]
            and (others := [row["ms"][x] for x in run["peers"] if x in row["ms"]])
        ]
        if speeds:
            commit = results.short_commit(other) or "unknown"
            sentences.append(
                f"{name} is not in this run. In that of commit {commit} it had "
                f"{geometric_mean(speeds):.2f} of the best other peer's speed (geometric mean of "
                f"{len(speeds)} cases), {min(speeds):.2f} to {max(speeds):.2f}."
            )
    return sentences


def of_kind(run: dict[str, Any], kind: str) -> list[Row]:
    """The rows of a run with one kind of work."""
    return [row for row in run["rows"] if row["kind"] == kind]


def _caption(run: dict[str, Any]) -> str:
    versions = [f"{name} {version}" for name, version in run["peers"].items() if version]
    seed = [f"seed {run['seed']}"] if run.get("seed") is not None else []
    where = ", ".join([results.where(run), *seed, *versions])
    return f"bf16, medians of {run['rounds']} rounds in which all take turns. {where}."


def _means(rows: list[Row]) -> str:
    lines = [
        "| | cases | geometric mean | least | below 1 |",
        "|---|---:|---:|---:|---:|",
    ]
    for kind, found in summarize(rows)["kinds"].items():
        numbers = f"{found['mean']:.2f} | {found['least']:.2f} | {found['below']}"
        lines.append(f"| {kind} | {found['cases']} | {numbers} |")
    return "\n".join(lines)


def _table(kind: str, rows: list[Row]) -> str:
    names = columns(rows)
    head = [f"{kind}, {rows[0]['unit']}", "kernel", *names, "× best peer"]
    lines = [f"| {' | '.join(head)} |", "|---|---|" + "---:|" * (len(names) + 1)]
    for row in rows:
        cells = [row["case"], row["chosen"] or "–", *(figure(row, name) for name in names)]
        lines.append(f"| {' | '.join([*cells, speed(row)])} |")
    return "\n".join(lines)


def speed(row: Row) -> str:
    """Lockstep's speed beside the best peer's; a dash where one of them has none."""
    if NAME not in row["speed"]:
        return "–"
    return f"{row['speed'][NAME]:.2f} {row['best_peer']}"
