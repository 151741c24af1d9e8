"""Random programs: the machine, all lanes at once, against Python, one lane at a time."""

from __future__ import annotations

import importlib.util
import random

import numpy as np
import pytest

LANES = 96  # three blocks of one warp
VARIABLES = ("a", "b", "c")
HEADER = """
from lockstep import simt
from lockstep.simt import cuda, int32

@simt.kernel
def kernel(out: int32[:, :], n: int32):
    i = cuda.grid(1)
"""


class Writer:
    """Writes a random body over a few int variables; every loop ends after a few trips."""

    def __init__(self, seed: int):
        self.random = random.Random(seed)
        self.loops = 0

    def value(self) -> str:
        return self.random.choice([*VARIABLES, "i", "n", str(self.random.randint(-3, 9))])

    def expression(self) -> str:
        op = self.random.choice(["+", "-", "*", "//", "%", "&", "|", "^"])
        right = str(self.random.randint(1, 7)) if op in ("//", "%") else self.value()
        return f"({self.value()} {op} {right}) % 1000"

    def condition(self) -> str:
        test = f"{self.value()} {self.random.choice(['<', '>', '==', '!='])} {self.value()}"
        if self.random.random() < 0.3:
            test += f" {self.random.choice(['and', 'or'])} {self.value()} % 3 == 1"
        return test

    def block(self, depth: int, in_loop: bool) -> list[str]:
        lines = []
        for _ in range(self.random.randint(1, 4)):
            lines += self.statement(depth, in_loop)
        return lines

    def statement(self, depth: int, in_loop: bool) -> list[str]:
        kind = self.random.choice(["assign"] * 3 + ["if", "if", "for", "while"] * (depth < 3))
        if in_loop and self.random.random() < 0.15:
            return [f"if {self.condition()}:", f"    {self.random.choice(['break', 'continue'])}"]
        if self.random.random() < 0.03:
            return [f"if {self.condition()}:", "    out[0, i] = a", "    return"]
        if kind == "assign":
            return [f"{self.random.choice(VARIABLES)} = {self.expression()}"]
        if kind == "if":
            lines = [f"if {self.condition()}:", *self.indented(depth, in_loop)]
            if self.random.random() < 0.5:
                lines += ["else:", *self.indented(depth, in_loop)]
            return lines
        self.loops += 1
        if kind == "for":
            bounds = self.random.choice(["4", "i % 4", f"{self.value()} % 5, 6", "5, i % 3, -1"])
            return [f"for k{self.loops} in range({bounds}):", *self.indented(depth, True)]
        count = f"w{self.loops}"
        return [
            f"{count} = 0",
            f"while {count} < 5 and ({self.condition()}):",
            f"    {count} += 1",
            *self.indented(depth, True),
        ]

    def indented(self, depth: int, in_loop: bool) -> list[str]:
        return [f"    {line}" for line in self.block(depth + 1, in_loop)]

    def body(self) -> list[str]:
        start = ["a = i * 7 % 13", "b = i % 5", "c = n - i"]
        stores = [f"out[{row}, i] = {name}" for row, name in enumerate(VARIABLES)]
        return [*start, *self.block(0, False), *self.block(0, False), *stores]


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 40))]
)
def test_random_program(seed, tmp_path):
    body = "\n".join(f"    {line}" for line in Writer(seed).body())
    path = tmp_path / "program.py"
    path.write_text(HEADER + body + "\n")
    spec = importlib.util.spec_from_file_location("program", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    namespace: dict = {}
    exec("def one_lane(out, n, i):\n" + body, namespace)
    wanted = np.zeros((3, LANES), np.int64)
    for i in range(LANES):
        namespace["one_lane"](wanted, 17, i)
    got = np.zeros((3, LANES), np.int32)
    module.kernel[LANES // 32, 32](got, 17).check()
    assert np.array_equal(got, wanted)
