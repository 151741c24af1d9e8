"""Markdown tables of single studies: what designs of the Hopper kernels were worth to each other.

Each has a results file of its own. It compares builds that a release does not contain: no command
makes it again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lockstep import results

Row = dict[str, Any]
PEER = "cuDNN"
PEERS = ("FA3", PEER)
# Columns of the first table on how a part of dQ leaves the SM, and what the results call them.
WAYS_OUT = {
    "ordered": "reductions from registers",
    "no order": "reductions from registers, no order",
    "no addition to dQ": "no addition to dQ",
    "no dQ": "no dQ",
}
WAYS_OUT_RUN, COPY_ENGINE_RUN, DIAGONAL_RUN = 2, 3, 4
# What made the backward faster, one after the other; then, where causal, one head at a time.
STEPS = {
    "from the diagonal": "from the diagonal",
    "two parts": "from the diagonal, two parts",
    "dQ a step later": "from the diagonal, two parts, dQ a step later",
}
ONE_HEAD = "one head in turn"
WIDE = "hopper-backward-wide"
# Builds of the backward with less latency in a step, and what the results call them.
WITHOUT = "hopper-backward-left-out"
LEFT_OUT = (
    "as it is",
    "one barrier",
    "no order",
    "Q and dO not loaded",
    "no product for dQ",
    "dS not stored",
    "no exponentials",
)
WAYS_OF_DQ = ("as it is", "one barrier", "dQ stored", "dQ not added", "dK first")
LEANER = {
    "as it is": "as it is",
    "leaner": "leaner",
    "S from −lse": "leaner, S starts from -lse",
    "dK, dQ, S in a row": "leaner, dK, dQ, S in a row",
}
SMS = 132
CYCLES = "hopper-backward-cycles"
# What instructions of a step move through shared memory, and for whom.
MOVES = {
    "operands of the five products": "HGMMA",
    "lse and delta into registers": "LDS",
    "dS, registers to shared memory": "STSM",
    "dQ, registers to shared memory": "STS",
}
# By head dim: whether the profile of the table is that under a causal mask.
MOVES_OF = {128: False, 64: True}
# Q and dO in, dQ out: 64 KB a step, 128 bytes at a time.
COPY_ENGINE_MOVES = 64 * 1024 // 128
# How the two warpgroups of the backward go about a step.
PAIRING = "hopper-backward-together"
PAIRINGS = ("before", "together", "operands found again", "apart")
PROFILED = ("FA4", "before", "together", "together, no order")
# dV in halves while exponentials go on, and what stood in the way of a step; then operands of
# products in registers.
HALVES = "hopper-backward-halves"
HALVES_RUN, OPERANDS_RUN = 7, 1
IN_HALVES = {
    "before": "before",
    "producer cleans": "the producer cleans queries",
    "dV in halves": "dV in halves",
    "no division": "no division",
    "both": "dV in halves, no division",
}
OPERANDS = {
    "before": "before",
    "half of K": "half of K in registers",
    "dP from −delta": "dP starts from -delta",
    "and S from −lse": "S starts from -lse, dP from -delta",
    "and half of V": "S starts from -lse, dP from -delta, half of V in registers",
    "and half of K": "S starts from -lse, dP from -delta, half of K in registers",
}
# Programs of the backward that draw one ticket after the other, and what made their ends short.
TICKETS = "hopper-backward-tickets"
STAYING_RUN, ENDS_RUN, MANY_HEADS_RUN = 2, 4, 5
STAYING = {
    "before": "before",
    "heads in turn": "ascending",
    "programs stay": "one program to an SM",
}
# Heads in turn in the run that compares these, by head dim and mask.
STAYING_HEADS = {(64, False): 8, (64, True): 32, (128, False): 8, (128, True): 16}
ENDS = {
    "before": "before",
    "programs stay": "one program to an SM",
    "two add": "two adders",
    "consumers clean": "consumers clean",
    "operands found again": "consumers clean, operands found again",
}


def forward_builds(directory: Path) -> str:
    """The best of the builds of the Hopper forward for each problem, beside the peers."""
    run = results.newest("hopper-forward-builds", directory)
    if run is None:
        return results.NOT_MEASURED
    cells: dict[tuple[Any, ...], dict[str, float]] = {}
    for row in run["rows"]:
        if "tflops" in row:
            problem = (row["D"], row["S"], row["causal"])
            cells.setdefault(problem, {})[row["kernel"]] = row["tflops"]
    lines = [
        f"| D, S | causal | best build | {' | '.join(('TFLOP/s', *PEERS))} |",
        f"|---|---|---|{'---:|' * (1 + len(PEERS))}",
    ]
    for (D, S, causal), found in sorted(cells.items()):
        best = max((name for name in found if name not in PEERS), key=found.__getitem__)
        rates = " | ".join(f"{found[name]:.0f}" for name in (best, *PEERS))
        lines.append(f"| {D}, {S // 1024}k | {_yes(causal)} | {best} | {rates} |")
    return "\n".join(lines) + f"\n\nbf16, {results.where_on_gpu(run)}."


def forward_ideas(directory: Path) -> str:
    """What ideas for the Hopper forward were worth at 16k without a mask, one after the other."""
    run = results.newest("hopper-forward", directory)
    if run is None:
        return results.NOT_MEASURED
    lines = ["| D | build | TFLOP/s |", "|---|---|---:|"]
    for row in sorted(run["ideas"], key=lambda row: int(row["D"])):
        lines.append(f"| {row['D']} | {row['kernel']} | {row['tflops']:.0f} |")
    return "\n".join(lines) + f"\n\nbf16, {results.where_on_gpu(run)}."


def ways_out(directory: Path) -> str:
    """The one-pass backward as it was and with its dQ left out bit by bit, four heads in turn."""

    def column(row: Row) -> str | None:
        if row["design"] == PEER:
            return PEER
        return _name(WAYS_OUT, row) if row["heads_at_once"] == 4 else None

    return by_design(directory, WAYS_OUT_RUN, (*WAYS_OUT, PEER), column)


def heads_in_turn(directory: Path) -> str:
    """The backward by the number of heads in turn, the best of each row in bold."""
    heads = ("1", "2", "4", "8", "16")

    def column(row: Row) -> str | None:
        return PEER if row["design"] == PEER else str(row["heads_at_once"])

    return by_design(directory, COPY_ENGINE_RUN, (*heads, PEER), column, mark=heads)


def backward_steps(directory: Path) -> str:
    """The backward as one idea after the other was added."""

    def column(row: Row) -> str | None:
        if row["design"] == PEER:
            return PEER
        if row["causal"] and row["heads_at_once"] != 4:
            is_last = row["design"] == STEPS["dQ a step later"]
            return ONE_HEAD if is_last and row["heads_at_once"] == 1 else None
        return _name(STEPS, row)

    return by_design(directory, DIAGONAL_RUN, (*STEPS, ONE_HEAD, PEER), column)


def wide_backward(directory: Path) -> str:
    """The backward for head dims above 128 beside what ran there before it, and its peers."""
    designs = ("two passes", "Triton", "FA2", PEER)
    return by_design(directory, 1, designs, lambda row: row["design"], designs, WIDE)


def backward_left_out(directory: Path) -> str:
    """The backward without some of its work."""
    return by_design(directory, 1, LEFT_OUT, lambda row: row["design"], suite=WITHOUT)


def backward_ways_of_dq(directory: Path) -> str:
    """The backward by what becomes of dQ."""
    return by_design(directory, 2, WAYS_OF_DQ, lambda row: row["design"], suite=WITHOUT)


def backward_cycles(directory: Path) -> str:
    """Cycles of an SM for a step of the backward, the fewest of each row in bold."""
    run = results.newest(CYCLES, directory)
    if run is None:
        return results.NOT_MEASURED
    cells: dict[tuple[int, int, bool], dict[str, int]] = {}
    for row in run["rows"]:
        problem = (row["D"], row["S"], row["causal"])
        cells.setdefault(problem, {})[row["design"]] = round(row["cycles"] * SMS / row["steps"])

    def show(found: dict[str, int]) -> list[str]:
        cycles = [found[design] for design in LEANER.values()]
        return [f"**{n:,}**" if n == min(cycles) else f"{n:,}" for n in cycles]

    return by_problem(tuple(LEANER), cells, show, "Cycles", run)


def backward_wavefronts(directory: Path) -> str:
    """What a step of the backward moves through shared memory."""
    run = results.newest(CYCLES, directory)
    if run is None:
        return results.NOT_MEASURED
    found = {(row["D"], row["causal"]): row["wavefronts_per_step"] for row in run["profile"]}
    columns = [found[problem] for problem in MOVES_OF.items()]
    lines = [f"| | {' | '.join(f'D {D}' for D in MOVES_OF)} |", f"|---|{'---:|' * len(MOVES_OF)}"]
    for what, name in MOVES.items():
        lines.append(f"| {what} | {' | '.join(f'{column[name]:,.0f}' for column in columns)} |")
    moves = " | ".join([str(COPY_ENGINE_MOVES)] * len(columns))
    lines.append(f"| copy engine: Q and dO in, dQ out (by their size) | {moves} |")
    where = "S 16k, at D 64 under a causal mask"
    return "\n".join(lines) + f"\n\nWavefronts, {where}, bf16, {results.where_on_gpu(run)}."


def backward_pairings(directory: Path) -> str:
    """The backward by how its warpgroups go about a step."""
    return by_design(directory, 1, PAIRINGS, lambda row: row["design"], PAIRINGS, PAIRING)


def backward_busy(directory: Path) -> str:
    """How busy the matrix units are in the backward, and in FA4's."""
    run = results.newest(PAIRING, directory)
    if run is None:
        return results.NOT_MEASURED
    cells: dict[tuple[int, int, bool], dict[str, float]] = {}
    for row in run["profile"]:
        problem = (row["D"], row["S"], row["causal"])
        cells.setdefault(problem, {})[row["design"]] = row["tensor_percent"]

    def show(found: dict[str, float]) -> list[str]:
        return [f"{found[name]:.0f} %" if name in found else "–" for name in PROFILED]

    return by_problem(PROFILED, cells, show, "Of the cycles an SM is active", run)


def backward_staying(directory: Path) -> str:
    """The backward with several heads in turn, and with programs that stay."""

    def column(row: Row) -> str | None:
        name = _name(STAYING, row)
        heads = None if name == "before" else STAYING_HEADS[row["D"], row["causal"]]
        return name if row["heads"] == heads else None

    return by_design(directory, STAYING_RUN, tuple(STAYING), column, tuple(STAYING), TICKETS)


def backward_ends(directory: Path) -> str:
    """The backward as the ends of its walks got shorter."""
    heads = tuple(ENDS)
    return by_design(directory, ENDS_RUN, heads, lambda row: _name(ENDS, row), heads, TICKETS)


def backward_many_heads(directory: Path) -> str:
    """The backward whose programs stay, by the number of heads in turn."""
    heads = ("4", "8", "16", "24", "32", "48", "64", "128")

    def column(row: Row) -> str | None:
        return str(row["heads"]) if row["design"] == "consumers clean, S first" else None

    return by_design(directory, MANY_HEADS_RUN, heads, column, heads, TICKETS)


def backward_halves(directory: Path) -> str:
    """The backward as dV came in halves, and a producer that cleans queries."""
    heads = tuple(IN_HALVES)
    return by_design(directory, HALVES_RUN, heads, lambda row: _name(IN_HALVES, row), heads, HALVES)


def backward_operands(directory: Path) -> str:
    """The backward with half of an operand in registers."""
    heads = tuple(OPERANDS)

    def column(row: Row) -> str | None:
        return _name(OPERANDS, row) if row["D"] == 128 else None

    return by_design(directory, OPERANDS_RUN, heads, column, heads, HALVES)


def _name(columns: dict[str, str], row: Row) -> str | None:
    """That of the column which shows a row's design."""
    return next((name for name, design in columns.items() if design == row["design"]), None)


def by_design(
    directory: Path,
    run_number: int,
    heads: tuple[str, ...],
    column: Callable[[Row], str | None],
    mark: tuple[str, ...] = (),
    suite: str = "hopper-backward",
) -> str:
    """TFLOP/s of one run of a study, a column for each design that `column` names; the best of
    `mark` stands out."""
    run = results.newest(suite, directory)
    if run is None:
        return results.NOT_MEASURED
    cells: dict[tuple[int, int, bool], dict[str, int]] = {}
    for row in run["rows"]:
        head = column(row) if row["run"] == run_number else None
        if head is not None:
            cells.setdefault((row["D"], row["S"], row["causal"]), {})[head] = round(row["tflops"])

    def show(found: dict[str, int]) -> list[str]:
        most = max((found.get(head, 0) for head in mark), default=None)
        return [_marked(found.get(head), head in mark, most) for head in heads]

    return by_problem(heads, cells, show, "TFLOP/s", run)


def by_problem(
    heads: tuple[str, ...],
    cells: dict[tuple[int, int, bool], Any],
    show: Callable[[Any], list[str]],
    unit: str,
    run: Row,
    dtype: str = "bf16",
) -> str:
    """A table with a row for each head dim, length and mask."""
    lines = [f"| D, S | causal | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
    for (D, S, causal), found in sorted(cells.items()):
        lines.append(f"| {D}, {S // 1024}k | {_yes(causal)} | {' | '.join(show(found))} |")
    return "\n".join(lines) + f"\n\n{unit}, {dtype}, {results.where_on_gpu(run)}."


def _yes(causal: bool) -> str:
    return "yes" if causal else "no"


def _marked(tflops: int | None, counts: bool, most: int | None) -> str:
    if tflops is None:
        return "–"
    return f"**{tflops}**" if counts and tflops == most else str(tflops)


BLOCKS: dict[str, Callable[[Path], str]] = {
    "hopper_forward_builds": forward_builds,
    "hopper_forward_ideas": forward_ideas,
    "hopper_backward_ways_out": ways_out,
    "hopper_backward_heads": heads_in_turn,
    "hopper_backward_steps": backward_steps,
    "hopper_backward_wide": wide_backward,
    "hopper_backward_cycles": backward_cycles,
    "hopper_backward_wavefronts": backward_wavefronts,
    "hopper_backward_left_out": backward_left_out,
    "hopper_backward_ways_of_dq": backward_ways_of_dq,
    "hopper_backward_pairings": backward_pairings,
    "hopper_backward_busy": backward_busy,
    "hopper_backward_staying": backward_staying,
    "hopper_backward_ends": backward_ends,
    "hopper_backward_many_heads": backward_many_heads,
    "hopper_backward_halves": backward_halves,
    "hopper_backward_operands": backward_operands,
}
