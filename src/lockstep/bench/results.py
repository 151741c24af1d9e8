"""Results files: one JSON per measured run, under benchmarks/results of a checkout.

{"suite": "cpu", "date": "2026-01-31", "environment": {...}, "rows": [{...}, ...]}
"""

from __future__ import annotations

import json
import re
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from lockstep.bench import environment

RESULTS = Path("benchmarks") / "results"


def checkout() -> Path | None:
    """The root of the checkout this package runs from, or None if it was installed elsewhere."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / RESULTS).is_dir() else None


def collect(suite: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A run as it goes into a file: its rows, and where and when they were measured."""
    return {
        "suite": suite,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "environment": environment.describe(),
        "rows": rows,
    }


def save(run: dict[str, Any], directory: Path) -> Path:
    """Write a run into `directory`, named after suite, processor, date and commit."""
    commit = run["environment"]["commit"]
    parts = (
        run["suite"],
        processor(run),
        run["date"],
        commit["hash"][:7] if commit else "unversioned",
    )
    path = directory / ("_".join(_slug(part) for part in parts) + ".json")
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def latest(suite: str, directory: Path) -> list[dict[str, Any]]:
    """The newest run of `suite` on each processor, ordered by processor."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in directory.glob("*.json")]
    newest: dict[str, dict[str, Any]] = {}
    for run in sorted((r for r in runs if r["suite"] == suite), key=lambda r: str(r["date"])):
        newest[processor(run)] = run
    return [newest[name] for name in sorted(newest)]


def processor(run: dict[str, Any]) -> str:
    """What a run was measured on: the first GPU for a suite of that name, else the CPU."""
    hardware = run["environment"]["hardware"]
    return str(hardware["gpus"][0] if run["suite"] == "gpu" else hardware["cpu"])


def where(run: dict[str, Any]) -> str:
    """One line that says on what a run was measured."""
    env = run["environment"]
    hardware, versions, commit = env["hardware"], env["versions"], env["commit"]
    machine = f"{env['threads']} threads on {hardware['cpu']} ({hardware['simd']})"
    if run["suite"] == "gpu":
        machine = f"{processor(run)}, Triton {versions['triton']}"
    parts = [
        machine,
        f"torch {versions['torch']}",
        f"Python {versions['python']}",
        run["date"],
    ]
    if commit:
        parts.append(f"commit {commit['hash'][:7]}{' with local changes' * commit['dirty']}")
    return ", ".join(parts)


def _slug(text: str) -> str:
    """Lower-case words joined by dashes, without the (R) and (TM) of processor names."""
    text = re.sub(r"\((r|tm)\)", " ", text.lower())
    return re.sub(r"[^a-z0-9.]+", "-", text).strip("-")
