"""The contents of a block after each phase, as pictures to step through."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from lockstep.ladder import Problem, Rung, find, run_on_machine
from lockstep.simt.machine.records.recording import Snapshot
from lockstep.simt.machine.records.trace import Trace

from .layouts import ROLES, matrices

# what is drawn of each rung: options and tokens; two or three key tiles
DRAWN: dict[str, tuple[dict[str, Any], int]] = {
    "naive": ({}, 64),
    "row_per_thread": ({}, 64),
    "large_tile": ({}, 240),
    "small_tile": ({"softmax": "tree"}, 180),
    "small_tile_2d": ({}, 180),
    "warp_mma": ({"tile": "64x64"}, 192),
    "split_kv": ({"tile": "8x8", "kv_tiles": 4}, 64),
    "block_tile": ({}, 192),
    "block_tile_mma": ({}, 192),
    "persistent_mma": ({}, 192),
}
USUAL = ({}, 128)
HEAD_DIM = 32
LAST = ("write", "join", "end")  # phases in which registers no longer hold m, l and acc
PLACES = {"shared": "shared memory", "local": "registers", "global": "global memory"}
NOTHING, MINUS_INFINITY = 255, 254  # codes; numbers are 0 to 200, 100 is zero

Pictures = dict[str, np.ndarray]


def drawn(name: str) -> tuple[Rung, Problem]:
    """The rung and the problem that its pictures are of."""
    options, tokens = DRAWN.get(name, USUAL)
    return find(name).choose(**options), Problem(1, 1, tokens, HEAD_DIM)


def rung_steps(name: str) -> dict[str, Any]:
    """The pictures of one block of a rung on a small problem."""
    rung, problem = drawn(name)
    _, traces = run_on_machine(rung, problem, record=0)
    steps = [step for trace in traces for step in _pictures(trace, problem)]
    return {
        "rung": name,
        "title": rung.title,
        "problem": str(problem),
        **encoded(steps, _spaces(traces), ROLES),
    }


def kernel_steps(trace: Trace) -> dict[str, Any]:
    """The pictures of any kernel: its shared arrays, and small global ones that it writes."""
    assert trace.recording is not None
    spaces = trace.recording.spaces
    held: Pictures = {}
    steps = []
    for snapshot in trace.recording.snapshots:
        held |= {n: a for n, a in snapshot.arrays.items() if spaces[n] != "local"}
        steps.append((trace.kernel, snapshot, dict(held)))
    names = {name: name for name in held}
    return {"rung": trace.kernel, "title": trace.kernel, **encoded(steps, spaces, names)}


def _spaces(traces: Iterable[Trace]) -> dict[str, str]:
    found: dict[str, str] = {}
    for trace in traces:
        assert trace.recording is not None
        found |= {name.split("[")[0]: s for name, s in trace.recording.spaces.items()}
    return found


def _pictures(trace: Trace, problem: Problem) -> Iterable[tuple[str, Snapshot, Pictures]]:
    """Kernel, snapshot and all matrices that attention speaks of, in order of time."""
    assert trace.recording is not None
    spaces = trace.recording.spaces
    held: Pictures = {}
    for snapshot in trace.recording.snapshots:
        held |= {
            name: array
            for name, array in snapshot.arrays.items()
            if snapshot.phase not in LAST or spaces[name] == "global"
        }
        found = matrices(trace.kernel, held, spaces)
        yield trace.kernel, snapshot, _of_attention(found, spaces, problem.S)


def _of_attention(found: Pictures, spaces: Mapping[str, str], tokens: int) -> Pictures:
    """Arrays that have a role, as many rows as there are tokens. Shared `sums` are scratch."""
    return {
        name: array[:tokens]
        for name, array in found.items()
        if name in ROLES and (name, spaces.get(name)) != ("sums", "shared")
    }


def encoded(
    steps: Iterable[tuple[str, Snapshot, Pictures]], spaces: Mapping[str, str], names: Any
) -> dict[str, Any]:
    """Pictures as bytes, each given at the steps at which it changes."""
    steps = [(kernel, snapshot, _flat(held)) for kernel, snapshot, held in steps]
    shapes = _shapes(held for _, _, held in steps)
    scales = _scales(steps)
    order = list(names)
    arrays = [
        {
            "name": name,
            "role": _role(name, names, shapes),
            "place": PLACES[spaces[name.split(" ")[0]]],
            "rows": shapes[name][0],
            "columns": shapes[name][1],
        }
        for name in sorted(shapes, key=lambda n: order.index(n.split(" ")[0]))
    ]
    last = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    shown = []
    numbers = _tiles([snapshot.phase for _, snapshot, _ in steps])
    for (kernel, snapshot, held), tile in zip(steps, numbers, strict=True):
        changed = {}
        for name in held.keys() & shapes.keys():
            rows, columns = shapes[name]
            array = held[name][:rows, :columns]
            if not np.array_equal(last[name], array, equal_nan=True):
                last[name] = array
                scale = scales[name, snapshot.phase]
                changed[name] = {"scale": scale, "codes": _code(array, scale)}
        shown.append(
            {
                "kernel": kernel,
                "phase": snapshot.phase,
                "tile": tile,
                "time": snapshot.time,
                "changed": changed,
            }
        )
    return {"arrays": arrays, "steps": shown}


def _flat(held: Pictures) -> Pictures:
    """Two dimensions: vectors as one column, stages of a tile apart."""
    found: Pictures = {}
    for name, array in held.items():
        if array.ndim <= 1 or array.shape[0] == array.size // array.shape[-1] == 1:
            found[name] = array.reshape(-1, 1)
        elif array.ndim == 2:
            found[name] = array
        else:
            stages = array.reshape(-1, *array.shape[-2:])
            for i, stage in enumerate(stages):
                found[name if len(stages) == 1 else f"{name} stage {i}"] = stage
    return found


def _shapes(pictures: Iterable[Pictures]) -> dict[str, tuple[int, int]]:
    """Rows and columns that are ever written: what is behind them is padding."""
    shapes: dict[str, tuple[int, int]] = {}
    for held in pictures:
        for name, array in held.items():
            written = ~np.isnan(array)
            rows, columns = shapes.get(name, (0, 0))
            if written.any():
                rows = max(rows, int(np.flatnonzero(written.any(axis=1))[-1]) + 1)
                columns = max(columns, int(np.flatnonzero(written.any(axis=0))[-1]) + 1)
            shapes[name] = rows, columns
    return {name: shape for name, shape in shapes.items() if shape[0]}


def _scales(steps: list[tuple[str, Snapshot, Pictures]]) -> dict[tuple[str, str], float]:
    """The largest magnitude of every picture by phase: what holds scores after one phase may hold
    weights after the next."""
    scales: dict[tuple[str, str], float] = {}
    for _, snapshot, held in steps:
        for name, array in held.items():
            finite = array[np.isfinite(array)]
            largest = float(np.abs(finite).max()) if finite.size else 0.0
            key = name, snapshot.phase
            scales[key] = max(scales.get(key, 0.0), largest)
    return scales


def _role(name: str, roles: Mapping[str, str], shown: Iterable[str]) -> str:
    """The caption of a picture; scores that weights replace in place say so."""
    array, _, stage = name.partition(" ")
    role = roles[array]
    if role == "S" and not any(roles[other.split(" ")[0]] == "P" for other in shown):
        role = "S, then P"
    return f"{role} {stage}" if stage else role


def _code(values: np.ndarray, scale: float) -> str:
    finite = np.where(np.isfinite(values), values, 0)
    codes = np.rint(100 + 100 * finite / (scale or 1))
    codes = np.where(np.isnan(values), NOTHING, codes)
    codes = np.where(np.isneginf(values), MINUS_INFINITY, codes)
    return base64.b64encode(codes.astype(np.uint8).tobytes()).decode()


def _tiles(phases: list[str]) -> list[int]:
    """The trip of the loop that each phase belongs to, from 1; 0 before it. A trip begins with the
    phase that comes first of those that come again."""
    again = [phase for phase in phases if phases.count(phase) > 1]
    numbers, tile = [], 0
    for phase in phases:
        tile += bool(again) and phase == again[0]
        numbers.append(tile)
    return numbers
