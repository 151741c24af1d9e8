"""Hopper kernels compiled without a GPU, and what their machine code says."""

from __future__ import annotations

import hashlib
import io
import os
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import triton
from launch_arguments import source_of
from machine_code import Instructions, between, disassemble, loops, run_tool, target
from operand_addresses import lost_operands

# Until the scores are there while a product is under way, and until the product is, too.
SCORES_WAIT, PRODUCT_WAIT = (f"WARPGROUP.DEPBAR.LE gsb0, 0x{n}" for n in (1, 0))


@dataclass(frozen=True)
class Build:
    """A compiled kernel, as Triton returns it."""

    kernel: Any

    @cached_property
    def report(self) -> str:
        """What ptxas says of the kernel. It takes seconds, so this is kept with Triton's builds."""
        path = _report_path(self.kernel)
        if not path.exists():
            options, ptx = ("-v", "--gpu-name=sm_90a", "-o", "/dev/null"), self.kernel.asm["ptx"]
            _keep(run_tool("ptxas", *options, content=ptx.encode(), suffix=".ptx").stderr, path)
        return path.read_text()

    @cached_property
    def instructions(self) -> Instructions:
        return disassemble(self.kernel.asm["cubin"])

    @property
    def main_loops(self) -> list[list[str]]:
        """Their instructions without addresses."""
        return [[text for _, text in loop] for loop in self.addressed_loops]

    @cached_property
    def addressed_loops(self) -> list[Instructions]:
        """The loops with a product under way behind the scores: one per consumer."""
        every_wait = [x for x in self.instructions if x[1].startswith("WARPGROUP.DEPBAR")]
        found = {}
        # Of jumps back to the same place, the last one.
        for begin, end in sorted(set(loops(self.instructions))):
            # Out of line, a wait that has to be repeated jumps back over much else.
            waits = [text for _, text in between(every_wait, begin, end)]
            if len(waits) == 2 and PRODUCT_WAIT in waits and waits[0] != waits[1]:
                found[begin] = between(self.instructions, begin, end)
        return list(found.values())

    @cached_property
    def overlaps(self) -> list[Instructions]:
        """From the start of each pair of products to a little behind the wait for the second."""
        texts = [text for _, text in self.instructions]
        found = []
        for i, text in enumerate(texts):
            if text == SCORES_WAIT:
                starts = [j for j in range(i) if texts[j] == "WARPGROUP.ARRIVE"]
                end = texts.index(PRODUCT_WAIT, i)
                found.append(self.instructions[starts[-2] : end + 40])
        return found

    @property
    def registers(self) -> int:
        return int(re.search(r"Used (\d+) registers", self.report)[1])


def writes_in_flight(loop: Instructions) -> list[str]:
    """Instructions of a loop that write a register a matrix product still reads or writes.

    Goes round twice on every combination of the forward branches inside. A product is under way
    from its HGMMA to a wait that covers it; instructions between are free to use any register the
    assembler thinks dead, and it has been seen to think so of the left operand."""
    end = loop[-1][0]
    to = {at: there for at, text in loop if (there := target(text)) and at < there <= end}
    addresses = [at for at, _ in loop]
    found = set()
    # Where paths meet that have the same products under way, they go on as one. A state is the
    # registers of each group of products, the last group at the end.
    first: set[Groups] = {(frozenset(),)}
    for _ in range(2):
        states: list[set[Groups]] = [first, *(set() for _ in loop)]
        for i, (at, text) in enumerate(loop):
            kind, registers, left = _step(text)
            if kind == "other" and any(not registers.isdisjoint(g) for x in states[i] for g in x):
                found.add(f"{at:#x}: {text}")
            after = {_groups_after(groups, kind, registers, left) for groups in states[i]}
            states[i + 1] |= after
            if at in to:
                states[bisect_left(addresses, to[at])] |= after
        first = states[-1]
    return sorted(found)


Groups = tuple[frozenset[int], ...]


def _groups_after(groups: Groups, kind: str, registers: frozenset[int], left: int) -> Groups:
    """Groups of products that are under way behind an instruction."""
    if kind == "arrive":
        return (*groups, frozenset())
    if kind == "wait":
        return groups[-left:] if left else (frozenset(),)
    if kind == "product":
        return (*groups[:-1], groups[-1] | registers)
    return groups


@cache
def _step(text: str) -> tuple[str, frozenset[int], int]:
    """What an instruction is to products, its registers, and groups that may stay under way."""
    if text.startswith("WARPGROUP.ARRIVE"):
        return "arrive", frozenset(), 0
    if text.startswith("WARPGROUP.DEPBAR"):
        return "wait", frozenset(), int(text.rsplit("0x", 1)[1], 16)
    if text.startswith("HGMMA"):
        return "product", frozenset(_of_product(text)), 0
    return "other", frozenset(_written(text)), 0


def usual_path(loop: Instructions) -> list[str]:
    """The fewest instructions from the start of a loop back to it: around what is rare."""
    index = {at: i for i, (at, _) in enumerate(loop)}
    # How many there are from each one on, and which is next.
    rest: list[tuple[int, int | None]] = [(0, None)] * len(loop)
    for i in range(len(loop) - 1, -1, -1):
        to = target(loop[i][1])
        ways = [(rest[i + 1][0] + 1, i + 1)] if i + 1 < len(loop) else []
        if to == loop[0][0]:
            ways = [(1, None)]
        elif to in index and index[to] > i:
            ways.append((rest[index[to]][0] + 1, index[to]))
        rest[i] = min(ways, key=lambda way: way[0])
    path, i = [], 0
    while i is not None:
        path.append(loop[i][1])
        i = rest[i][1]
    return path


def _of_product(text: str) -> set[int]:
    """The registers of an HGMMA: its accumulator, and its left operand if that is not in memory."""
    width, acc, left = re.match(r"HGMMA\.64x(\d+)x16\S* R(\d+), (R\d+|gdesc\[\w+\])", text).groups()
    registers = set(range(int(acc), int(acc) + int(width) // 2))
    if left.startswith("R"):
        registers |= set(range(int(left[1:]), int(left[1:]) + 4))
    return registers


def _written(text: str) -> set[int]:
    """The vector registers an instruction writes, by its first operand that is not a predicate."""
    name = text.split()[0]
    first = re.match(r"\S+ (?:!?P\w+, )*R(\d+)", text)
    if first is None or name.startswith(("ST", "RED", "R2UR", "BAR", "SYNCS", "U")):
        return set()
    n = 4 if ".128" in name else 2 if ".64" in name or ".WIDE" in name else 1
    return set(range(int(first[1]), int(first[1]) + n))


def count(body: list[str]) -> Counter[str]:
    """Instructions by name, modifiers aside but for MUFU."""
    names = (text.split()[0] for text in body)
    return Counter(name if name.startswith("MUFU") else name.split(".")[0] for name in names)


def unused_barriers(ttgir: str) -> list[str]:
    """Names of the mbarriers that are initialised and then never used.

    The compiler gives their memory to something else, in which they came up again on a GPU that
    several processes share.
    """

    lines_with = defaultdict(list)
    for line in ttgir.splitlines():
        for name in set(re.findall(r"%\w+", line)):
            lines_with[name].append(line)

    def uses(name: str) -> list[str]:
        return [x for x in lines_with[name] if f"{name} =" not in x]

    def is_used(name: str) -> bool:
        for line in uses(name):
            index = re.match(r"\s*(%\w+) = ttg\.memdesc_index", line)
            if is_used(index[1]) if index else "init_barrier" not in line:
                return True
        return False

    made = re.findall(r"(%\w+) = ttg\.local_alloc[^\n]*xi64", ttgir)
    return [name for name in made if not is_used(name)]


def compile_for_hopper(function: Any, arguments: tuple[Any, ...], **options: Any) -> Build:
    """Compile a Gluon kernel for sm_90 as a launch with these arguments would; all its barriers are
    used, and all its products find their operands."""
    source = source_of(function, arguments, options, 90)
    said = io.StringIO()
    with triton.knobs.nvidia.scope(), redirect_stdout(said):
        triton.knobs.nvidia.dump_ptxas_log = True
        kernel = source.compile()
    # Nothing for a build that Triton has kept. From Triton 3.9 on the tool is ptxas-blackwell.
    if re.search(r"ptxas\S* info", said.getvalue()):
        _keep(said.getvalue(), _report_path(kernel))
    assert unused_barriers(kernel.asm["ttgir"]) == []
    # Where a build stops early there is none.
    if kernel.asm["cubin"]:
        assert lost_operands(kernel.asm["cubin"]) == []
    return Build(kernel)


def _report_path(kernel: Any) -> Path:
    digest = hashlib.sha256(f"{triton.__version__} {kernel.asm['ptx']}".encode()).hexdigest()
    return Path(triton.knobs.cache.dir) / f"ptxas-{digest}.txt"


def _keep(text: str, path: Path) -> None:
    """Writes a file that other processes see as a whole or not at all."""
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_text(text)
    unfinished.replace(path)
