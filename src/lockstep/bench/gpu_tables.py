"""Markdown tables of `lockstep bench gpu`, each out of the newest run on a GPU that has it.

`gpu` is for the README: what `lockstep.attention` reaches, beside the best peer of each case. The
others are for the pages on the kernels, with the figures of every contender.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from lockstep.bench.ours import EQUAL, INVARIANT
from lockstep.output import results

Row = dict[str, Any]
Run = dict[str, Any]
BEST = "best peer"
HOST = ("host", "host_decode")


@dataclass(frozen=True)
class View:
    """Which rows and columns of a run a page shows.

    peers: None shows all.
    ratios: (mine, other), a column for each: how many times as fast.
    """

    tables: tuple[str, ...]
    ours: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]
    peers: tuple[str, ...] | None = None

    def __call__(self, directory: Path) -> str:
        blocks = []
        for run in chain.from_iterable(current(directory, self.ours[0])):
            found = [self._table(run, name) for name in self.tables]
            blocks += [table for table in found if table]
            if any(found):
                blocks.append(caption(run, self.tables))
        return "\n\n".join(blocks) or results.NOT_MEASURED

    def _table(self, run: Run, name: str) -> str:
        rows = in_order(row for row in run["rows"] if row["table"] == name)
        contenders = [column for column in columns(rows) if self._shows(rows, column)]
        if not set(contenders) & set(self.ours):
            return ""
        ratios = [r for r in self.ratios if {*r} <= {*contenders, BEST}]
        heads = [*contenders, *(f"{mine} / {other}" for mine, other in ratios)]
        lines = [f"| {name}, {rows[0]['unit']} | {' | '.join(heads)} |", _rule(len(heads))]
        for row in rows:
            cells = [
                f"**{figure(row, c)}**" if c == best(row, contenders) else figure(row, c)
                for c in contenders
            ]
            cells += [ratio(row, mine, other) for mine, other in ratios]
            lines.append(f"| {row['case']} | {' | '.join(cells)} |")
        return "\n".join(lines)

    def _shows(self, rows: Sequence[Row], column: str) -> bool:
        if column in self.ours:
            return True
        peers = {name for row in rows for name in row["peers"]}
        return column in (peers if self.peers is None else self.peers)


def current(directory: Path, contender: str = "") -> list[list[Run]]:
    """The runs that the tables of each GPU come from, each with the tables that no newer run has;
    with a contender, only those of runs in which it took part."""
    found = []
    for runs in results.by_processor("gpu", directory):
        runs = [run for run in runs if not contender or _had(run, contender)]
        # A table that no run has counts as missing from the newest.
        newest = {_table_of(case): i for i, run in enumerate(runs) for case in run["missing"]}
        newest |= {row["table"]: i for i, run in enumerate(runs) for row in run["rows"]}
        parts = [_only(run, {t for t, j in newest.items() if j == i}) for i, run in enumerate(runs)]
        found.append([part for part in parts if part["rows"]])
    return found


def _had(run: Run, contender: str) -> bool:
    """Whether a contender took part in a run, or nothing did."""
    return not run["rows"] or any(contender in columns([row]) for row in run["rows"])


def _only(run: Run, tables: set[str]) -> Run:
    """A run as if it had had no other tables."""
    rows = [row for row in run["rows"] if row["table"] in tables]
    return {**run, "rows": rows, "missing": [c for c in run["missing"] if _table_of(c) in tables]}


def _table_of(missing_case: str) -> str:
    return missing_case.split(":")[0]


def summary(directory: Path) -> str:
    """The speed of Lockstep's choice in each case, and how it compares with the best peer."""
    blocks = []
    for runs in current(directory):
        rows = in_order(row for run in runs for row in run["rows"])
        blocks += [_prefill_matrix(rows), _decode_matrix(rows), _short_list(rows)]
        for run in runs:
            names = ", ".join(dict.fromkeys(row["table"] for row in run["rows"]))
            blocks.append(f"{names}: " * (len(runs) > 1) + caption(run))
    return "\n\n".join(block for block in blocks if block) or results.NOT_MEASURED


def _prefill_matrix(rows: list[Row]) -> str:
    heads = {
        ("forward", False): "forward",
        ("forward", True): "forward, causal",
        ("backward", False): "backward",
        ("backward", True): "backward, causal",
    }
    cells = {(r["D"], r["S"], r["table"], r["causal"]): _achieved(r) for r in rows}
    shapes = dict.fromkeys((r["D"], r["S"]) for r in rows if (r["table"], r["causal"]) in heads)
    lines = [f"| TFLOP/s | {' | '.join(heads.values())} |", _rule(len(heads))]
    for D, S in shapes:
        line = [cells.get((D, S, *head), "–") for head in heads]
        lines.append(f"| D {D}, S {S // 1024}k | {' | '.join(line)} |")
    return "\n".join(lines) if shapes else ""


def _decode_matrix(rows: list[Row]) -> str:
    rows = [row for row in rows if row["table"] == "decode"]
    lengths, batches = (sorted({row[size] for row in rows}) for size in ("S", "B"))
    cells = {(row["B"], row["S"]): _achieved(row) for row in rows}
    heads = (f"{S // 1024}k keys" for S in lengths)
    lines = [f"| decode, GB/s | {' | '.join(heads)} |", _rule(len(lengths))]
    for B in batches:
        lines.append(f"| batch {B} | {' | '.join(cells.get((B, S), '–') for S in lengths)} |")
    return "\n".join(lines) if rows else ""


def _short_list(rows: list[Row]) -> str:
    order = ("small", "varlen", *HOST)
    chosen = [row for table in order for row in rows if row["table"] == table]
    lines = ["| | |", "|---|---:|"]
    lines += [f"| {_short_name(row)} | {_achieved(row, unit=True)} |" for row in chosen]
    return "\n".join(lines) if chosen else ""


def _short_name(row: Row) -> str:
    kind = {HOST[0]: "prefill", HOST[1]: "decode"}.get(row["table"])
    return f"time of the host for a call: {kind}, {row['case']}" if kind else row["case"]


def _achieved(row: Row, unit: bool = False) -> str:
    """The chosen kernel's figure and its ratio to the best peer, in bold if it is ahead."""
    chosen = row["chosen"]
    if chosen not in row["ms"]:
        return figure(row, chosen)
    text = figure(row, chosen) + f" {row['unit']}" * unit
    if row["best_peer"] is None:
        return text
    speed = row["speed"][chosen]
    text = f"{text} ({speed:.2f}× {row['best_peer']})"
    return f"**{text}**" if speed >= 1 else text


def caption(run: Run, tables: tuple[str, ...] | None = None) -> str:
    """How the figures of `tables` (all, if None) were measured, and which cases are missing."""

    def wanted(table: str) -> bool:
        return tables is None or table in tables

    versions = [f"{name} {version}" for name, version in run["peers"].items() if version]
    errors = [e for row in run["rows"] if wanted(row["table"]) for e in row["error"].values()]
    text = f"bf16, medians of {run['rounds']} rounds in which all take turns; "
    percent = math.ceil(100 * max(errors, default=0))
    text += f"no error is above {percent} % of what the error rule allows. "
    text += ", ".join([results.where(run), *versions]) + "."
    missing = [case for case in run["missing"] if wanted(_table_of(case))]
    return f"{text} Not in this run: {'; '.join(missing)}." if missing else text


def in_order(rows: Iterable[Row]) -> list[Row]:
    """The rows sorted by head dim, batch size in the decode table, length and mask."""
    return sorted(
        rows,
        key=lambda row: (row["D"], row["B"] * (row["table"] == "decode"), row["S"], row["causal"]),
    )


def columns(rows: Iterable[Row]) -> list[str]:
    """Names of the contenders that have a figure in some row, or failed in one, in their order."""
    return list(dict.fromkeys(name for row in rows for name in (*row["ms"], *row["failed"])))


def best(row: Row, shown: Sequence[str]) -> str | None:
    """The fastest contender of a row among those shown, without bounds."""
    timed = [n for n in shown if n in row["ms"] and n in (*row["ours"], *row["peers"])]
    return min(timed, key=lambda name: row["ms"][name], default=None)


def figure(row: Row, name: str | None) -> str:
    """The figure of a contender in the unit of the table; `failed`, `wrong`, or a dash where it has
    none."""
    if name in row["failed"]:
        wrong = row["failed"][name].startswith("WrongResult")
        return "wrong" if wrong else "failed"
    if name not in row["rate"]:
        return "–"
    rate = row["rate"][name]
    return f"{rate:.1f}" if row["unit"] == "µs" else f"{rate:,.0f}"


def ratio(row: Row, mine: str, other: str) -> str:
    """How many times as fast as `other` a contender is."""
    if other == BEST:
        return f"{row['speed'][mine]:.2f}" if mine in row["speed"] else "–"
    if mine not in row["ms"] or other not in row["ms"]:
        return "–"
    return f"{row['ms'][other] / row['ms'][mine]:.2f}"


def _rule(n: int) -> str:
    return f"|---|{'---:|' * n}"


_TRITON = ("triton", "triton" + INVARIANT)
_PACKED = tuple((name, name + EQUAL) for name in ("hopper", "triton"))
BLOCKS: dict[str, Callable[[Path], str]] = {
    "gpu": summary,
    "hopper_forward": View(("forward", "small"), ("hopper",), (("hopper", BEST),)),
    "hopper_backward": View(("backward",), ("hopper",), (("hopper", BEST),)),
    "triton_forward": View(
        ("forward",), _TRITON, (("triton", "FA2"), ("triton", "flex")), ("FA2", "flex")
    ),
    "triton_backward": View(("backward",), ("triton",), (("triton", "FA2"),), ("FA2",)),
    "triton_decode": View(("decode",), _TRITON, (("triton", "FA3"), ("triton", "FA3 one split"))),
    "varlen": View(("varlen",), sum(_PACKED, ()), _PACKED),
}
