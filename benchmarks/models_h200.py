"""`lockstep bench gpu --suite models` with FA3 and FA4 from bundles; see `gpu_h200.py`.

    python benchmarks/models_h200.py PEERS_DIRECTORY --warm-up-with 12
    python benchmarks/models_h200.py PEERS_DIRECTORY --save-to benchmarks/results

The first command calls what compiles once for every case, in several processes, so that all
compilers have their results on disk; the second times all contenders.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

import torch
from gpu_h200 import claim, keep_builds, unpack

from lockstep.bench.models import cases, drawn, run
from lockstep.bench.models.contender import Contender, call_of
from lockstep.bench.models.inputs import make

STARTED = perf_counter()


def start_workers(processes: int) -> int:
    """Call everything once in so many processes; the seconds it took are printed."""
    claims = tempfile.mkdtemp()
    command = [sys.executable, *sys.argv, "--claims", claims]
    workers = [subprocess.Popen(command) for _ in range(processes)]
    statuses = [worker.wait() for worker in workers]
    print(f"warmed up in {perf_counter() - STARTED:.0f} s", flush=True)
    return max(statuses)


def warm_up(wanted: list[cases.Case], contenders: list[Contender], claims: Path) -> None:
    """In one of several processes: call what compiles and no other one has claimed."""
    compiling = [e for e in contenders if e.kind == "ours" or e.name == "FA4"]
    calls = [(case, contender) for contender in compiling for case in wanted]
    for number, (case, contender) in enumerate(calls):
        if not claim(claims / str(number)):
            continue
        start = perf_counter()
        try:
            with torch.no_grad():
                call_of(contender, make(case))()
            torch.cuda.synchronize()
        except NotImplementedError:
            pass
        except Exception as error:
            # The run will show the same in its cell.
            print(f"{contender.name}, {case.name}: {error}"[:300], file=sys.stderr)
        torch.cuda.empty_cache()
        if perf_counter() - start > 1:
            seconds = perf_counter() - start
            print(f"{seconds:.1f} s: {contender.name}, {case.name}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, metavar="PEERS_DIRECTORY")
    parser.add_argument("--warm-up-with", type=int, default=0, metavar="PROCESSES")
    parser.add_argument("--only", default="", help="a regular expression for names of cases")
    parser.add_argument("--kinds", default="", help="forward, backward, decode, joined by commas")
    parser.add_argument("--seed", type=int, help="cases drawn at random instead of models")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--query-invariant", action="store_true")
    parser.add_argument("--sustained", type=float, metavar="SECONDS")
    parser.add_argument("--without", action="append", default=[], help="name of a contender")
    parser.add_argument("--save-to", type=Path, help="directory for the results file")
    parser.add_argument("--budget-seconds", type=float, help="begin no case after this time")
    parser.add_argument("--claims", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_builds()
    # It unpacks what is in a bundle: before others look for it.
    unpack(options.peers)
    if options.warm_up_with and not options.claims:
        return start_workers(options.warm_up_with)
    kinds = [kind for kind in options.kinds.split(",") if kind]
    if options.claims:
        contenders = run.contenders(options.query_invariant, options.without)
        among = None if options.seed is None else drawn.draw(options.seed)
        warm_up(cases.choose(options.only, kinds, among), contenders, options.claims)
        return 0
    budget = options.budget_seconds
    return run.main(
        options.only,
        kinds,
        seed=options.seed,
        quick=options.quick,
        query_invariant=options.query_invariant,
        sustained_seconds=options.sustained,
        without=options.without,
        deadline=None if budget is None else STARTED + budget,
        directory=options.save_to,
    )


if __name__ == "__main__":
    raise SystemExit(main())
