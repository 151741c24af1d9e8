"""The secret-flow proof of the constant-time rungs has teeth: each kernel with a leak fails it."""

from __future__ import annotations

import importlib.util
import linecache
import sys
from pathlib import Path

import pytest

from lockstep.ladder import Problem, find, launches_of, run_on_machine
from lockstep.ladder.check import errors
from lockstep.ladder.parts import mma_rows
from lockstep.simt import SecretLeak

SHORTER = "kv_tiles = (length + BLOCK - 1) // BLOCK"
BRANCH = "base = 0.0 if top == EMPTY else top"
# rung, a line of its kernel, the line that a hurried programmer would write, what gives it away
LEAKS = {
    "block_tile: only the tiles that the length needs": (
        "block_tile",
        "kv_tiles = (seq + BLOCK - 1) // BLOCK",
        SHORTER,
        "a loop bound depends on a secret",
    ),
    "block_tile_mma: only the tiles that the length needs": (
        "block_tile_mma",
        "kv_tiles = (seq + BLOCK - 1) // BLOCK",
        SHORTER,
        "a loop bound depends on a secret",
    ),
    "block_tile: a branch for rows that saw nothing": (
        "block_tile",
        "base = ct.select(top == EMPTY, 0.0, top)",
        BRANCH,
        "a conditional expression (use ct.select) depends on a secret",
    ),
    "block_tile_mma: a branch for rows that saw nothing": (
        "block_tile_mma",
        "base = ct.select(top == EMPTY, 0.0, top)",
        BRANCH,
        "a conditional expression (use ct.select) depends on a secret",
    ),
    "block_tile: no correction where the maximum stays": (
        "block_tile",
        "        for c in range(D // 8):\n            acc[i, c] *= correction",
        "        if correction < 1.0:\n"
        "            for c in range(D // 8):\n"
        "                acc[i, c] *= correction",
        "a branch depends on a secret",
    ),
    "block_tile_mma: weights stored where the scores point": (
        "block_tile_mma",
        "spread_row(s_tile, row, half, factor, SHARE)",
        "spread_row(s_tile, row, half + simt.int32(factor), factor, SHARE)",
        "an address depends on a secret",
    ),
    "row_per_thread: no correction where the maximum stays": (
        "row_per_thread",
        "correction = ct.exp2(m - base)",
        "correction = ct.exp2(m - base) if m < base else 1.0",
        "a conditional expression (use ct.select) depends on a secret",
    ),
}


def with_planted(rung: str, line: str, instead: str, directory: Path):
    """The rung's module with one line changed, of its own or of the steps in `mma_rows`."""
    source = Path(find(rung).launches.__code__.co_filename).read_text(encoding="utf-8")
    if line not in source:
        steps = Path(mma_rows.__file__).read_text(encoding="utf-8")
        changed = load("lockstep.ladder.parts.mma_rows_leaks", steps, line, instead, directory)
        line, instead = f"from {mma_rows.__name__} import", f"from {changed.__name__} import"
    return load(f"lockstep.ladder.rungs.{rung}_leaks", source, line, instead, directory)


def load(name: str, source: str, line: str, instead: str, directory: Path):
    assert source.count(line) == 1
    path = directory / f"{name.rpartition('.')[2]}.py"
    path.write_text(source.replace(line, instead), encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("leak", LEAKS)
def test_a_planted_leak_is_found(leak, tmp_path):
    rung, line, instead, message = LEAKS[leak]
    problem = Problem(B=1, H=1, S=70, D=64, length=33)
    (launch,) = launches_of(find(rung), problem, problem.draw())
    launch.kernel.typed(**launch.arguments)  # the rung itself passes
    planted = getattr(with_planted(rung, line, instead, tmp_path), rung)
    with pytest.raises(SecretLeak) as caught:
        planted.typed(**launch.arguments)
    assert message in str(caught.value)
    assert instead.strip().splitlines()[0].strip() in str(caught.value)


@pytest.mark.parametrize("name", ["block_tile", "block_tile_mma"])
@pytest.mark.parametrize("causal", [False, True])
def test_garbage_beyond_the_length_stays_there(name, causal):
    problem = Problem(B=1, H=2, S=80, D=32, causal=causal, length=37)
    tensors = problem.draw()
    clean = problem.draw()
    tensors.k[:, :, 37:] = float("nan")
    tensors.v[:, :, 37:] = float("inf")
    run_on_machine(find(name), problem, tensors)[1][0].check()
    assert errors(problem, clean._replace(out=tensors.out)).ok


@pytest.mark.parametrize("name", ["block_tile", "block_tile_mma"])
def test_one_block_barrier_per_key_tile(name):
    problem = Problem(B=1, H=1, S=200, D=32)
    _, (trace,) = run_on_machine(find(name), problem)
    barriers = [line for line in trace.lines if line.text.strip() == "cuda.syncthreads()"]
    warps = 4
    assert [line.executions for line in barriers] == [4 * 4 * warps]  # query tiles by key tiles


@pytest.mark.parametrize("name", ["block_tile", "block_tile_mma"])
def test_machine_code_branches_where_the_source_does(name):
    """Loops, and two conditions on public numbers; no call, as the slow path of a division is."""
    pytest.importorskip("cuda.core", reason="needs the extra gpu to compile")
    from lockstep.simt.cuda_cpp import emit
    from lockstep.simt.nvrtc import compile_source
    from lockstep.simt.sass import disassemble

    problem = Problem(B=1, H=1, S=70, D=64, causal=True, length=33)
    (launch,) = launches_of(find(name), problem, problem.draw())
    source = emit(launch.kernel.typed(**launch.arguments), threads=launch.block)
    code = disassemble(compile_source(source, "sm_90"))
    assert code.count("CALL") == 0
    jumps = {
        linecache.getline(*place).strip()
        for place, instructions in code.by_line().items()
        if any(i.opcode.startswith(("BRA", "BRX", "JMP")) for i in instructions)
    }
    loops = {line for line in jumps if line.startswith("for ")}
    public = {"if kv_tile + 1 < kv_tiles:", "if q_row0 + q_row < seq:", "if q_row0 + row < seq:"}
    assert loops
    assert jumps - loops <= public
