"""Tables of the audits of constant time, and of what it costs, out of the results files.

constant-time-cost-<gpu>.json                   from benchmarks/constant_time_h200.py
constant-time-times-<group>-<gpu>.json, constant-time-counters-<group>-<gpu>.json
                                                from benchmarks/constant_time_gpu.py
constant-time-code-gpu.json                     from benchmarks/constant_time_code.py
constant-time_<cpu>_....json                    from benchmarks/constant_time_cpu.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.audit.timing.clock import ALL
from lockstep.output import results
from lockstep.output.formats import duration, number

Run = dict[str, Any]
GROUPS = ("kernels", "rungs", "leaks")
ORDINARY, CONSTANT_TIME, FA3 = "ordinary", "constant time", "FA3"
SECRET_LENGTHS = "constant time, secret lengths"


def cost_block(directory: Path) -> str:
    """Each cell in constant time, beside the ordinary build and FA3."""
    run = results.newest("constant-time-cost", directory)
    if run is None:
        return results.NOT_MEASURED
    lines = [
        "| | shape | ordinary | constant time | of the ordinary speed | of FA3's |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for row in run["rows"]:
        seconds = row["seconds"]
        ours = {"constant time": CONSTANT_TIME, "secret lengths": SECRET_LENGTHS}
        for title, name in ours.items():
            if name not in seconds:
                continue
            what = row["pass"] if name == CONSTANT_TIME else f"{row['pass']}, {title}"
            base, mine = seconds[ORDINARY], seconds[name]
            fa3 = f"{seconds[FA3] / mine:.2f}" if FA3 in seconds else "–"
            lines.append(
                f"| {what} | {_shape(row)} | {duration(base)} | {duration(mine)} "
                f"| {base / mine:.2f} | {fa3} |"
            )
    return "\n".join(lines) + f"\n\n{results.where_on_gpu(run)}."


def cost_summary_block(directory: Path) -> str:
    """The lowest and the highest speed in constant time, by pass and head dim."""
    run = results.newest("constant-time-cost", directory)
    if run is None:
        return results.NOT_MEASURED
    found: dict[str, list[tuple[float, float | None]]] = {}
    for row in run["rows"]:
        seconds = row["seconds"]
        for name, title in ((CONSTANT_TIME, ""), (SECRET_LENGTHS, ", secret lengths")):
            if name in seconds:
                mine = seconds[name]
                fa3 = seconds[FA3] / mine if FA3 in seconds else None
                what = f"{row['pass']}, D {row['D']}{title}"
                found.setdefault(what, []).append((seconds[ORDINARY] / mine, fa3))
    lines = ["| constant time | of the ordinary speed | of FA3's |", "|---|---:|---:|"]
    for what, ratios in found.items():
        ordinary, fa3s = zip(*ratios, strict=True)
        lines.append(f"| {what} | {_range(ordinary)} | {_range(fa3s)} |")
    return "\n".join(lines) + f"\n\n{results.where_on_gpu(run)}."


def _range(ratios: Iterable[float | None]) -> str:
    known = sorted(x for x in ratios if x is not None)
    return " to ".join(dict.fromkeys(f"{x:.2f}" for x in (known[0], known[-1]))) if known else "–"


def _shape(row: dict[str, Any]) -> str:
    heads = f" H{row['H']}" if "H" in row else ""
    causal = ", causal" if row.get("causal") else ""
    return f"B{row['B']}{heads} S{row['S']} D{row['D']}{causal}"


class Timed(NamedTuple):
    """The times of one subject: t of all classes, and by class."""

    subject: str
    samples: int
    t: float
    of_classes: dict[str, float]
    nanoseconds: float
    course: list[tuple[int, float]]


def timed(run: Run, planted: bool | None = None) -> list[Timed]:
    """The subjects of a run; of planted leaks or of none, where it has both."""
    found: dict[str, Timed] = {}
    for row in run["rows"]:
        if row["layer"] != "time" or row.get("planted", planted) != planted:
            continue
        subject, _, name = row["name"].removesuffix(" against random").rpartition(": ")
        figures = row["figures"]
        if name == ALL:
            median = figures["median_ns"]["random"]
            course = [(n, t) for n, t in figures["course"]]
            samples = figures["samples"]
            found[subject] = Timed(subject, samples, figures["t"], {}, median, course)
        else:
            found[subject].of_classes[name] = figures["t"]
    return list(found.values())


def times_block(directory: Path) -> str:
    """t of everything that was timed on a GPU."""
    runs = [results.newest(f"constant-time-times-{group}", directory) for group in GROUPS]
    return _times([(run, timed(run)) for run in runs if run is not None])


def cpu_times_block(directory: Path) -> str:
    """t of everything that was timed on CPUs."""
    runs = _on_cpus(directory)
    return _times([(run, timed(run, planted)) for planted in (False, True) for run in runs])


def _on_cpus(directory: Path) -> list[Run]:
    """The newest run on each CPU; where there are several, their rows name it."""
    runs = results.latest("constant-time", directory)
    if len(runs) < 2:
        return runs
    return [{**run, "rows": [_named(row, run) for row in run["rows"]]} for run in runs]


def _named(row: dict[str, Any], run: Run) -> dict[str, Any]:
    """A row of a run on a CPU, with the name of that CPU."""
    cpu = run["environment"]["hardware"]["cpu"].replace("(R)", "")
    subject, colon, rest = row["name"].partition(": ")
    return {**row, "name": f"{subject} ({cpu}){colon}{rest}"}


def _times(found: list[tuple[Run, list[Timed]]]) -> str:
    found = [(run, subjects) for run, subjects in found if subjects]
    if not found:
        return results.NOT_MEASURED
    lines = [
        "| | samples | median | t of all classes | largest t of a class |",
        "|---|---:|---:|---:|---:|",
    ]
    for _, subjects in found:
        for each in subjects:
            worst = max(each.of_classes.items(), key=lambda item: abs(item[1]), default=None)
            last = "–" if worst is None else f"{worst[1]:.1f} ({worst[0]})"
            median = duration(each.nanoseconds * 1e-9)
            lines.append(
                f"| {each.subject} | {number(each.samples)} | {median} | {each.t:.1f} | {last} |"
            )
    return "\n".join(lines) + f"\n\n{_where(run for run, _ in found)}."


def _where(runs: Iterable[Run]) -> str:
    """The hardware and versions of runs, each of several once."""
    return "; ".join(
        dict.fromkeys(
            results.where_on_gpu(run) if run["suite"] != "constant-time" else results.where(run)
            for run in runs
        )
    )


def counters_block(directory: Path) -> str:
    """The counters of Nsight Compute, and whether they are the same for all classes."""
    lines = [
        "| | classes | kernels | instructions of warps | sectors | differences |",
        "|---|---:|---:|---:|---:|---|",
    ]
    counted = [_counted(group, directory) for group in GROUPS]
    if not any(counted):
        return results.NOT_MEASURED
    lines += [_counters(*item) for found in counted for item in found.items()]
    runs = [rows[0]["run"] for found in counted for rows in found.values()]
    return "\n".join(lines) + f"\n\n{_where(runs)}."


def _counted(group: str, directory: Path) -> dict[str, list[dict[str, Any]]]:
    """The rows of each subject in the newest run that counted it, each with that run."""
    found: dict[str, list[dict[str, Any]]] = {}
    for run in results.by_date(f"constant-time-counters-{group}", directory):
        for subject in {row["subject"] for row in run["rows"]}:
            found.pop(subject, None)
        for row in run["rows"]:
            found.setdefault(row["subject"], []).append({**row, "run": run})
    return found


def _counters(subject: str, rows: list[dict[str, Any]]) -> str:
    launches = rows[0]["launches"]
    executed = sum(launch["executed"]["warps"] for launch in launches)
    sectors = sum(launch["sectors ld"] + launch["sectors st"] for launch in launches)
    differing = [row["secrets"] for row in rows if row["differs"]]
    verdict = "in " + ", ".join(differing) if differing else "none"
    return (
        f"| {subject} | {len(rows)} | {len(launches)} | {executed:,} | {sectors:,.0f} | {verdict} |"
    )


def cpu_counters_block(directory: Path) -> str:
    """Valgrind's counters of CPU calls, and whether they are the same for all classes."""
    lines = [
        "| | classes | kernels | instructions | loads, stores | misses | branches | differences |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    runs = _on_cpus(directory)
    rows = [row for run in runs for row in run["rows"] if row["layer"] == "counters"]
    rows = [row for row in rows if row["figures"]]
    if not rows:
        return results.NOT_MEASURED
    for row in sorted(rows, key=lambda row: bool(row["planted"])):
        figures = row["figures"]
        counts = figures["counts"].values()

        def total(*names: str, counts: Iterable[dict[str, int]] = counts) -> str:
            return f"{sum(count[name] for count in counts for name in names):,}"

        verdict = row["detail"].split(": ")[-1] if row["detail"] else "none"
        lines.append(
            f"| {row['name']} | {figures['classes']} | {len(counts)} | {total('instructions')} "
            f"| {total('loads', 'stores')} | {total('load misses', 'store misses')} "
            f"| {total('branches')} | {verdict} |"
        )
    return "\n".join(lines) + f"\n\n{_where(runs)}."


def summary_block(directory: Path) -> str:
    """Layer by layer: how much was audited, and how many planted leaks were found."""
    lines = ["| layer | audited | without a finding | planted leaks found |", "|---|---|---:|---:|"]
    for title, rows in _layers(directory).items():
        ours, planted = ([row for row in rows if row["planted"] == x] for x in (False, True))
        what, layer = title
        lines.append(f"| {layer} | {what} | {_share(ours)} | {_share(planted)} |")
    return "\n".join(lines)


def _share(rows: list[dict[str, Any]]) -> str:
    return f"{sum(row['ok'] for row in rows)} of {len(rows)}" if rows else "not measured yet"


def _layers(directory: Path) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """Rows with `planted` and `ok`, by what was audited and by layer."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    code = results.newest("constant-time-code", directory)
    found["builds of GPU kernels and rungs", "machine code"] = code["rows"] if code else []
    for title, layer in (
        ("builds of CPU kernels", "code"),
        ("CPU calls", "memcheck"),
        ("CPU calls, class by class", "counters"),
        ("CPU calls", "time"),
    ):
        rows = [
            row
            for run in _on_cpus(directory)
            for row in run["rows"]
            if row["layer"] == layer and not row["skipped"]
        ]
        if layer == "time":
            rows = _subjects(rows)
        names = {"code": "machine code", "memcheck": "Valgrind"}
        found[title, names.get(layer, layer)] = rows
    counted, clocked = [], []
    for group in GROUPS:
        leak = group == "leaks"
        for rows in _counted(group, directory).values():
            differs = any(row["differs"] for row in rows)
            counted.append({"planted": leak, "ok": differs == leak})
        run = results.newest(f"constant-time-times-{group}", directory)
        clocked += _subjects([{**row, "planted": leak} for row in run["rows"]] if run else [])
    found["GPU kernels and rungs, class by class", "counters"] = counted
    found["GPU kernels and rungs", "time"] = clocked
    return found


def _subjects(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row of times for each subject, without a finding if none of its classes has one."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        subject = row["name"].removesuffix(" against random").rpartition(": ")[0]
        first = found.setdefault(subject, {"planted": row["planted"], "ok": True})
        first["ok"] &= row["ok"]
    return list(found.values())


BLOCKS: dict[str, Callable[[Path], str]] = {
    "constant_time_cost": cost_block,
    "constant_time_cost_summary": cost_summary_block,
    "constant_time_times": times_block,
    "constant_time_cpu_times": cpu_times_block,
    "constant_time_counters": counters_block,
    "constant_time_cpu_counters": cpu_counters_block,
    "constant_time_summary": summary_block,
}
