"""The course of t over the samples of the timing audit, as a picture for the docs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from lockstep.audit.timing.clock import CLEAR, LIMIT
from lockstep.bench.constant_time_tables import GROUPS, Timed, timed
from lockstep.output import results

WIDTH, HEIGHT, LEFT, TOP, PLOT_WIDTH, PLOT_HEIGHT = 860, 400, 60, 46, 560, 300
FEWEST, MOST_T = 200, 1e5
STYLES = {
    "GPU kernels": "#1f6feb",
    "rungs of the ladder": "#2da44e",
    "CPU kernels": "#8250df",
    "planted leaks": "#cf222e",
}


def picture(directory: Path) -> str:
    """An SVG: |t| of all classes against random, log over log; empty where nothing was measured."""
    lines = {name: list(found) for name, found in _found(directory).items()}
    most = max((each.samples for found in lines.values() for each in found), default=10**6)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        "<title>Size of t over the number of samples</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="24" font-size="14" fill="#1f2328">'
        "|t|, all classes of secrets against random ones</text>",
        *_axes(most),
    ]
    for (name, found), color in zip(lines.items(), STYLES.values(), strict=True):
        parts += [_course(each, color, most) for each in found]
        parts += _legend(name, len(found), color, list(STYLES).index(name))
    return "\n".join([*parts, "</svg>", ""])


def _found(directory: Path) -> dict[str, Iterator[Timed]]:
    runs = {group: results.newest(f"constant-time-times-{group}", directory) for group in GROUPS}
    cpu = results.latest("constant-time", directory)
    gpu = {group: timed(run) if run else [] for group, run in runs.items()}
    return {
        "GPU kernels": iter(gpu["kernels"]),
        "rungs of the ladder": iter(gpu["rungs"]),
        "CPU kernels": (each for run in cpu for each in timed(run, False)),
        "planted leaks": iter([*gpu["leaks"], *(x for run in cpu for x in timed(run, True))]),
    }


def _x(samples: float, most: int) -> float:
    share = math.log(samples / FEWEST) / math.log(most / FEWEST)
    return LEFT + PLOT_WIDTH * share


def _y(t: float) -> float:
    share = math.log(max(abs(t), 0.1) / 0.1) / math.log(MOST_T / 0.1)
    return TOP + PLOT_HEIGHT * (1 - min(share, 1))


def _axes(most: int) -> Iterator[str]:
    bottom, right = TOP + PLOT_HEIGHT, LEFT + PLOT_WIDTH
    yield (
        f'<rect x="{LEFT}" y="{TOP}" width="{PLOT_WIDTH}" height="{PLOT_HEIGHT}" '
        'fill="none" stroke="#8c959f"/>'
    )
    for power in range(3, 8):
        if 10**power <= most:
            x = _x(10**power, most)
            yield (
                f'<line x1="{x:.1f}" y1="{bottom}" x2="{x:.1f}" y2="{bottom + 5}" '
                'stroke="#8c959f"/>'
            )
            yield (
                f'<text x="{x:.1f}" y="{bottom + 20}" text-anchor="middle" fill="#1f2328">'
                f"{10**power:,}</text>"
            )
    yield (
        f'<text x="{(LEFT + right) / 2}" y="{bottom + 40}" text-anchor="middle" fill="#1f2328">'
        "samples</text>"
    )
    for power in range(-1, 6):
        y = _y(10.0**power)
        yield f'<line x1="{LEFT - 5}" y1="{y:.1f}" x2="{LEFT}" y2="{y:.1f}" stroke="#8c959f"/>'
        yield (
            f'<text x="{LEFT - 9}" y="{y + 4:.1f}" text-anchor="end" fill="#1f2328">'
            f"{10.0**power:g}</text>"
        )
    for t, what in ((LIMIT, "a kernel stays below"), (CLEAR, "a leak must reach")):
        y = _y(t)
        yield (
            f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" stroke="#1f2328" '
            'stroke-dasharray="5 4"/>'
        )
        shift = 12 if t == LIMIT else -3
        yield f'<text x="{right + 8}" y="{y + shift:.1f}" fill="#1f2328">{t:g}: {what}</text>'


def _course(each: Timed, color: str, most: int) -> str:
    points = " ".join(f"{_x(n, most):.1f},{_y(t):.1f}" for n, t in each.course)
    return (
        f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.2" '
        f'stroke-opacity="0.75"><title>{each.subject}</title></polyline>'
    )


def _legend(name: str, n: int, color: str, row: int) -> Iterator[str]:
    x, y = LEFT + PLOT_WIDTH + 12, TOP + 14 + 20 * row
    yield f'<line x1="{x}" y1="{y}" x2="{x + 22}" y2="{y}" stroke="{color}" stroke-width="3"/>'
    yield f'<text x="{x + 30}" y="{y + 4}" fill="#1f2328">{name} ({n})</text>'
