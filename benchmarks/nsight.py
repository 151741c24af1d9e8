"""What Nsight Compute counts of kernels, as the lockstep machine counts it: for scripts beside."""

from __future__ import annotations

import csv
import io
import subprocess
from collections.abc import Collection

GLOBAL_OPS = ("ld", "st", "atom", "red")  # loads include asynchronous copies
SHARED_OPS = ("ld", "st", "ldsm", "ldgsts", "atom")
WAVEFRONTS = "l1tex_data_pipe_lsu_wavefronts_mem_shared_op"
EXECUTED = {"ld": "shared_ld", "st": "shared_st", "atom": "shared_atom"}
METRICS = {
    **{f"requests_{op}": f"l1tex__t_requests_pipe_lsu_mem_global_op_{op}" for op in GLOBAL_OPS},
    **{f"sectors_{op}": f"l1tex__t_sectors_pipe_lsu_mem_global_op_{op}" for op in GLOBAL_OPS},
    # counted instruction by instruction
    **{f"wavefronts_{op}": f"smsp__sass_{WAVEFRONTS}_{op}" for op in SHARED_OPS},
    # counted in the pipe, where wavefronts of one warp also wait for those of others
    **{f"pipe_{op}": f"l1tex__{WAVEFRONTS[6:]}_{op}" for op in ("ld", "st", "atom")},
    # executed with at least one lane on
    **{
        f"executed_{op}": f"smsp__inst_executed_op_{EXECUTED.get(op, op)}_pred_on_any"
        for op in SHARED_OPS
    },
}


def known_metrics() -> dict[str, str]:
    """Those of METRICS that this Nsight Compute has for Hopper."""
    done = subprocess.run(
        ["ncu", "--query-metrics", "--chip", "gh100"], capture_output=True, text=True, check=True
    )
    names = {line.split()[0] for line in done.stdout.splitlines() if line.strip()}
    return {short: f"{name}.sum" for short, name in METRICS.items() if name in names}


def launches_of(names: Collection[str], command: list[str]) -> list[dict[str, float]]:
    """The metrics of each launch of kernels with these names that a command makes, in order."""
    metrics = known_metrics()
    counting = [
        *("ncu", "--csv", "--clock-control", "none", "--print-units", "base"),
        *("--kernel-name", f"regex:^({'|'.join(sorted(names))})$"),
        *("--metrics", ",".join(metrics.values())),
    ]
    done = subprocess.run([*counting, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ncu failed:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")
    table = done.stdout[done.stdout.index('"ID"') :]
    short = {name: key for key, name in metrics.items()}
    launches: dict[int, dict[str, float]] = {}
    for record in csv.DictReader(io.StringIO(table)):
        values = launches.setdefault(int(record["ID"]), {})
        value = record["Metric Value"].replace(",", "")
        values[short[record["Metric Name"]]] = float(value) if value not in ("", "n/a") else 0.0
    return [launches[i] for i in sorted(launches)]


def version() -> str:
    done = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=False)
    return done.stdout.strip().splitlines()[-1]


def counts(raw: dict[str, float]) -> dict[str, int]:
    """The machine's quantities from the metrics."""

    def total(prefix: str) -> int:
        return int(sum(raw.get(f"{prefix}_{op}", 0) for op in {*GLOBAL_OPS, *SHARED_OPS}))

    return {
        "global_requests": total("requests"),
        "global_sectors": total("sectors"),
        "shared_wavefronts": total("wavefronts"),
        "shared_accesses": total("executed"),
        "matrix_loads": int(raw.get("executed_ldsm", 0)),
    }
