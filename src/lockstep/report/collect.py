"""Everything the page shows, as one dictionary of JSON: traced anew, or read from results files."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from lockstep.ladder import RUNGS

from . import GPU, measured
from .rung_views import PROBLEM, rung_view
from .tile_steps import rung_steps

WORKERS = 2
Data = dict[str, Any]
Told = Callable[[str], None]  # is called with what was finished


def claims_view() -> list[Data]:
    """Every claim of the ledger with its verdict."""
    from lockstep.ladder.claims.page import findings

    return [finding.as_json() for finding in findings()]


def tasks() -> list[tuple[str, Callable[..., Any], tuple]]:
    """Key, function and arguments of all that is computed anew."""
    found: list[tuple[str, Callable[..., Any], tuple]] = [("claims", claims_view, ())]
    found += [
        (f"trace {step.title}", rung_view, (rung.name, dict(step.chosen)))
        for rung in RUNGS
        for step in rung.steps()
    ]
    found += [(f"tiles {rung.name}", rung_steps, (rung.name,)) for rung in RUNGS]
    return found


def collect(
    directory: Path | None, audit_files: Iterable[Path] = (), told: Told = lambda what: None
) -> Data:
    """Trace all rungs, test the claims, read results of `directory` (none, if it is None).

    Raises ValueError for a file of `audit_files` that is no audit.
    """
    audits = measured.audits(directory, audit_files)
    return assemble(_compute(tasks(), told), directory, audits)


def assemble(made: Data, directory: Path | None, audits: Data) -> Data:
    """The data of a page from what was computed, by the keys of `tasks`, and from results."""
    rungs = [made[key] for key in made if key.startswith("trace ")]
    sources: Data = {}
    for rung in rungs:
        sources |= rung.pop("sources", {})
    return {
        "kind": "ladder",
        **about(),
        "problem": str(PROBLEM),
        "gpu": GPU,
        "rungs": rungs,
        "sources": sources,
        "steps": [made[key] for key in made if key.startswith("tiles ")],
        "claims": made["claims"],
        "counts": measured.rung_counts(directory),
        "times": measured.rung_times(directory),
        "phase_times": measured.phase_times(directory),
        "roofline": measured.roofline(directory),
        "peers": measured.peers(directory),
        "audits": audits,
    }


def about() -> Data:
    """The date and the version with which a page was made."""
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return {"made": now, "version": metadata.version("lockstep-attention")}


def _compute(jobs: list[tuple[str, Callable[..., Any], tuple]], told: Told) -> Data:
    """Results by key, in the order of `jobs`."""
    workers = min(WORKERS, os.cpu_count() or 1)
    # torch has threads of its own, which a fork would not take along
    context = multiprocessing.get_context("spawn")
    made: Data = {}
    with ProcessPoolExecutor(workers, context, _leave_interrupts_to_the_parent) as pool:
        futures: dict[Future, str] = {}
        for key, function, arguments in jobs:
            futures[pool.submit(function, *arguments)] = key
        try:
            for future in as_completed(futures):
                made[futures[future]] = future.result()
                told(futures[future])
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return {key: made[key] for key, _, _ in jobs}


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
