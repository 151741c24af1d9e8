"""The ladder: attention kernels from naive to tensor cores.

rungs/   the kernels, one file each, numbered in climbing order
parts/   pieces that several of them share
rung.py  what a rung is, and how to run one on the machine or on a GPU
check.py, plan.py, survey.py, sweep.py, tracing.py   tools that take any rung
tables.py, plan_screen.py, cli.py   their tables and commands
claims/  claims of documents about these kernels, held against plans, traces and times
"""

from __future__ import annotations

from .rung import (
    Launch,
    LaunchPlan,
    PhasePlan,
    Problem,
    Rung,
    Tensors,
    launches_of,
    plans_of,
    run_on_gpu,
    run_on_machine,
    shared_layout,
)
from .rungs import RUNGS, find

__all__ = [
    "RUNGS",
    "Launch",
    "LaunchPlan",
    "PhasePlan",
    "Problem",
    "Rung",
    "Tensors",
    "find",
    "launches_of",
    "plans_of",
    "run_on_gpu",
    "run_on_machine",
    "shared_layout",
]
