"""Results files: one JSON per measured run, under benchmarks/results of a checkout.

{"suite": "cpu", "date": "2026-01-31", "time": "14:05", "environment": {...}, "rows": [{...}, ...]}
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lockstep import environment

NOT_MEASURED = "Not measured yet."  # in place of a table
RESULTS = Path("benchmarks") / "results"
ON_GPU = ("gpu", "models", "drawn-cases")  # suites that measure a GPU


def checkout() -> Path | None:
    """The root of the checkout this package runs from, or None if it was installed elsewhere."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / RESULTS).is_dir() else None


def collect(suite: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A run as it goes into a file: its rows, and where and when they were measured."""
    now = datetime.now(timezone.utc)
    return {
        "suite": suite,
        "date": now.strftime("%Y-%m-%d"),
        "time": now.strftime("%H:%M"),
        "environment": environment.describe(),
        "rows": rows,
    }


def save(run: dict[str, Any], directory: Path) -> Path:
    """Write a run into `directory`, named after suite, processor, date and commit."""
    return write(run, path_of(run, directory))


def path_of(run: dict[str, Any], directory: Path) -> Path:
    """The path that `save` writes a run to."""
    parts = (run["suite"], processor(run), run["date"], short_commit(run) or "unversioned")
    return directory / ("_".join(_slug(part) for part in parts) + ".json")


def save_for_gpu(run: dict[str, Any], name: str, directory: Path) -> Path:
    """Write a run as `name`-<gpu>.json, in place of the one before it."""
    gpu = run["environment"]["hardware"]["gpus"][0].split()[-1].lower()
    return write(run, directory / f"{name}-{gpu}.json")


def write(run: dict[str, Any], path: Path) -> Path:
    """Write a run into `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def latest(suite: str, directory: Path) -> list[dict[str, Any]]:
    """The newest run of `suite` on each processor, ordered by processor."""
    return [runs[-1] for runs in by_processor(suite, directory)]


def by_processor(suite: str, directory: Path) -> list[list[dict[str, Any]]]:
    """All runs of `suite`, those of one processor together, oldest first; ordered by processor."""
    runs: dict[str, list[dict[str, Any]]] = {}
    for run in by_date(suite, directory):
        runs.setdefault(processor(run), []).append(run)
    return [runs[name] for name in sorted(runs)]


def newest(suite: str, directory: Path) -> dict[str, Any] | None:
    """The newest run of `suite` on any machine; None if there is none."""
    runs = by_date(suite, directory)
    return runs[-1] if runs else None


def by_date(suite: str, directory: Path) -> list[dict[str, Any]]:
    """All runs of `suite` on any machine, oldest first."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")]
    runs = [run for run in runs if run["suite"] == suite]
    return sorted(runs, key=lambda run: (run["date"], run.get("time", "")))


def processor(run: dict[str, Any]) -> str:
    """The processor of a run: the first GPU for a suite that measures one, else the CPU, and how
    many of its cores if not all."""
    hardware = run["environment"]["hardware"]
    if run["suite"] in ON_GPU:
        return str(hardware["gpus"][0])
    threads, cores = run["environment"].get("threads"), hardware.get("cores")
    some = f", {threads} of {cores} cores" if threads and cores and threads < cores else ""
    return f"{hardware['cpu']}{some}"


def where(run: dict[str, Any]) -> str:
    """One line that says on what a run was measured."""
    env = run["environment"]
    hardware, versions = env["hardware"], env["versions"]
    threads = f"{env['threads']} thread{'s' * (env['threads'] != 1)}"
    machine = f"{threads} on {hardware['cpu']} ({hardware['simd']})"
    if run["suite"] in ON_GPU:
        machine = f"{processor(run)}, Triton {versions['triton']}"
    parts = [
        machine,
        f"torch {versions['torch']}",
        f"Python {versions['python']}",
        *_when(run),
    ]
    return ", ".join(parts)


def where_on_gpu(run: dict[str, Any]) -> str:
    """The same for a run that only the GPU had a part in."""
    env = run["environment"]
    parts = [", ".join(env["hardware"]["gpus"]), f"torch {env['versions']['torch']}", *_when(run)]
    return ", ".join(parts)


def short_commit(run: dict[str, Any]) -> str | None:
    """The first seven digits of the commit that a run measured; None if that is not known."""
    commit = run["environment"]["commit"]
    return commit["hash"][:7] or None if commit else None


def _when(run: dict[str, Any]) -> list[str]:
    """The date, and the commit where it is known."""
    short = short_commit(run)
    if short is None:
        return [run["date"]]
    commit = run["environment"]["commit"]
    changed = " with local changes" * commit.get("dirty", False)
    # A trial that was not kept, or a branch before its commits were put onto others.
    outside = " outside this history" * (not commit.get("in_history", True))
    return [run["date"], f"commit {short}{changed}{outside}"]


def _slug(text: str) -> str:
    """Lower-case words joined by dashes, without the (R) and (TM) of processor names."""
    text = re.sub(r"\((r|tm)\)", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")
