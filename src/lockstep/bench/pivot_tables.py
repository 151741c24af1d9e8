"""Markdown tables that results files describe themselves: what a single study of designs came to.

Under `tables` such a file has, by the name of the block on a page::

    of           the list with the figures, "rows" unless given
    where        fields that a row of it must have, with their values
    by           fields that tell the lines of the table apart, ["D, S", "causal"] unless given
    columns      title -> the fields of the rows it shows; or a list, where any of several will do
    value        the field with the figure, "tflops" unless given
    format       how it is written, "{:.0f}" unless given
    bold         "max" or "min": which figure of a line stands out; `bold_among` names the columns
    caption      the unit, and what all figures have in common
    on           "cpu" for a table of a CPU in a machine that has a GPU
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from lockstep.output import results

Row = dict[str, Any]
Run = dict[str, Any]
BY = ["D, S", "causal"]


def rows_of(common: Row, figures: dict[str, float]) -> list[Row]:
    """A row for each figure of a line of `table_of`, which `common` tells apart from others."""
    return [{**common, "column": name, "figure": figure} for name, figure in figures.items()]


def table_of(by: list[str], columns: Iterable[str], digits: int, caption: str) -> dict[str, Any]:
    """The description of a table of what `rows_of` made."""
    return {
        "by": by,
        "columns": {name: {"column": name} for name in columns},
        "value": "figure",
        "format": f"{{:,.{digits}g}}",
        "caption": caption,
    }


def find(directory: Path) -> dict[str, tuple[dict[str, Any], Run]]:
    """Every table that a results file describes, by name: what `render` takes, of the newest run
    where several describe it."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")]
    found = {}
    for run in sorted(runs, key=lambda run: (run["date"], run.get("time", ""))):
        for name, description in run.get("tables", {}).items():
            found[name] = description, run
    return found


def render(description: dict[str, Any], run: Run) -> str:
    """One table of a run."""
    by, columns = description.get("by", BY), description["columns"]
    value = description.get("value", "tflops")
    lines: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in run[description.get("of", "rows")]:
        key = _key(row, by)
        if key is None or value not in row or not _matches(row, description.get("where", {})):
            continue
        for title, where in columns.items():
            if any(_matches(row, way) for way in (where if isinstance(where, list) else [where])):
                lines.setdefault(key, {})[title] = row[value]
    text = [f"| {' | '.join([*by, *columns])} |", "|" + "---|" * len(by) + "---:|" * len(columns)]
    for key in sorted(lines, key=_sizes):
        cells = [*map(_label, key), *_figures(lines[key], description)]
        text.append(f"| {' | '.join(cells)} |")
    on_gpu = run["environment"]["hardware"]["gpus"] and description.get("on") != "cpu"
    where_run = results.where_on_gpu(run) if on_gpu else results.where(run)
    return "\n".join(text) + f"\n\n{description['caption']}, {where_run}."


def _matches(row: Row, where: dict[str, Any]) -> bool:
    return all(name in row and row[name] == value for name, value in where.items())


def _key(row: Row, by: list[str]) -> tuple[Any, ...] | None:
    """The values that identify a line: one for each of `by`, a pair for "D, S"; None where the row
    lacks one."""
    names = [name.split(", ") for name in by]
    if not all(part in row for parts in names for part in parts):
        return None
    return tuple(
        tuple(row[part] for part in parts) if len(parts) > 1 else row[parts[0]] for parts in names
    )


def _sizes(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """Lines are in the order of their sizes; where these are equal, in that of the file."""
    return tuple(value for value in key if not isinstance(value, str))


def _label(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        D, S = value
        return f"{D}, {S // 1024}k"
    return str(value)


def _figures(found: dict[str, float], description: dict[str, Any]) -> list[str]:
    """The cells of one line, a dash for a column without a figure."""
    text = {title: description.get("format", "{:.0f}").format(x) for title, x in found.items()}
    among = [x for x in description.get("bold_among", description["columns"]) if x in found]
    if "bold" in description and among:
        best = text[(max if description["bold"] == "max" else min)(among, key=found.__getitem__)]
        text |= {title: f"**{best}**" for title in among if text[title] == best}
    return [text.get(title, "–") for title in description["columns"]]
