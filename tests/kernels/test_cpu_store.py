"""Compiled code on disk: whatever is wrong with it, a kernel runs, and never from a broken file."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numba
import numpy as np
import pytest
from numba.core.typed_passes import NativeLowering

import lockstep
from lockstep import forks
from lockstep.commands import doctor
from lockstep.kernels import cpu
from lockstep.kernels.cpu.compiler import compile as compiling
from lockstep.kernels.cpu.compiler import lowering, machine, scalar, shortcuts, store
from lockstep.kernels.cpu.compiler.vectors import f32


def _answer(arguments):
    """Writes 42 where its address says."""
    scalar.store_word(42, arguments)


NAME = f"{__name__.rpartition('.')[2]}._answer"


def _run() -> int:
    """What a process does that has not run the kernel before."""
    result = np.zeros(1, np.int64)
    compiling.Kernel(_answer)(result.ctypes.data)
    return int(result[0])


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """The only directory there is."""
    directory = tmp_path / "home"
    monkeypatch.setattr(store, "directories", lambda: [directory])
    monkeypatch.setattr(store, "_warned", False)
    return directory


@pytest.fixture
def compilations(monkeypatch) -> list[str]:
    """The kernels that were compiled and not loaded."""
    names: list[str] = []
    generate = machine.generate

    def counted(module, entry):
        names.append(entry)
        return generate(module, entry)

    monkeypatch.setattr(machine, "generate", counted)
    return names


def _file(home: Path) -> Path:
    (path,) = home.iterdir()
    return path


def test_a_kernel_is_compiled_once(home, compilations):
    assert [_run(), _run()] == [42, 42]
    assert compilations == [NAME]
    assert _file(home).suffix == store.SUFFIX


def test_of_several_processes_one_compiles(home, compilations):
    _run()
    path = _file(home)
    code = path.read_bytes()
    path.unlink()
    other = os.open(home, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)

    def finish() -> None:
        path.write_bytes(code)
        os.close(other)

    threading.Timer(0.2, finish).start()
    assert _run() == 42
    assert compilations == [NAME]


def test_a_process_that_was_stopped_is_not_waited_for(home, compilations, monkeypatch):
    home.mkdir()
    other = os.open(home, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    monkeypatch.setattr(store, "LONGEST_WAIT", 0.1)
    assert _run() == 42
    assert compilations == [NAME]
    os.close(other)


def _question(arguments):
    """Writes 6 · 9 where its address says."""
    scalar.store_word(scalar.load_word(arguments) * 9, arguments)


def test_several_kernels_are_compiled_together_once_each(home, compilations):
    kernels = [compiling.Kernel(function) for function in (_question, _answer, _question)]
    compiling.have_ready(kernels[:2])
    assert sorted(compilations) == sorted({kernel.name for kernel in kernels})
    assert all(kernel.is_ready for kernel in kernels[:2])
    assert not kernels[2].is_ready
    compiling.have_ready(kernels)
    results = np.array([6, 0, 6], np.int64)
    for i, kernel in enumerate(kernels):
        kernel(results.ctypes.data + 8 * i)
    assert results.tolist() == [54, 42, 54]
    assert len(compilations) == 2


@pytest.mark.filterwarnings("ignore:lockstep compiles its CPU kernels in memory")
def test_kernels_compiled_together_are_not_compiled_again_where_there_is_no_disk(
    tmp_path, monkeypatch, compilations
):
    (blocked := tmp_path / "file").touch()
    monkeypatch.setattr(store, "directories", lambda: [blocked])
    kernels = [compiling.Kernel(function) for function in (_question, _answer)]
    compiling.have_ready(kernels)
    result = np.array([6], np.int64)
    kernels[0](result.ctypes.data)
    assert result[0] == 54
    assert len(compilations) == 2


@pytest.mark.slow
def test_kernels_are_compiled_together_at_exit_too(tmp_path):
    """When no thread can be had for it any more."""
    program = """
import atexit
import numpy as np
from lockstep.kernels.cpu.compiler import compile as compiling
from test_cpu_store import _answer, _question

def late():
    kernels = [compiling.Kernel(function) for function in (_question, _answer)]
    compiling.have_ready(kernels)
    results = np.array([6, 0], np.int64)
    for i, kernel in enumerate(kernels):
        kernel(results.ctypes.data + 8 * i)
    print("results", results.tolist())

atexit.register(late)
"""
    path = os.pathsep.join([*map(str, (Path(lockstep.__file__).parents[1], Path(__file__).parent))])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": path}
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "results [54, 42]" in ended.stdout


def test_code_does_not_depend_on_what_is_compiled_at_the_same_time():
    kernels = [compiling.Kernel(function) for function in (_question, _answer)]
    lowered = [kernel.lowered() for kernel in kernels]
    alone = [kernel.generate(x) for kernel, x in zip(kernels, lowered, strict=True)]
    with ThreadPoolExecutor(4) as pool:
        together = [pool.submit(kernels[i % 2].generate, lowered[i % 2]) for i in range(16)]
    assert [code.result() for code in together] == alone * 8


def _arithmetic() -> Callable[[int], None]:
    """Operators of all kinds on numbers and constants, in parts that nothing has lowered before."""

    @compiling.compiled
    def whole(x, y):
        low = (x + 3) * y // (y - 2) % 7 & 255 | x ^ 1
        return low + (x << 2 >> 1) if x <= y != 4 else max(-low, y)

    @compiling.compiled
    def real(x, y):
        return (f32(x) * f32(0.5) - f32(y)) / f32(3.0) + f32(whole(x, y))

    def run(arguments):
        for i in range(0, 10, 2):
            x, y = scalar.load_word(arguments), scalar.load_word(arguments + 8 * i)
            if x > y or x == 5:
                scalar.store(real(x, y), arguments + 4 * whole(y, x))

    return run


def test_shortcuts_lower_to_what_numba_lowers_to(monkeypatch):
    def texts() -> list[str]:
        found = "\n".join(lowering.lower(_arithmetic()).texts)
        # Counters and addresses of this process.
        return re.sub(r"\$\d+|B\d+v\d+B|globals\.[0-9a-f]+|\d{12,}", "", found).splitlines()

    short = texts()
    passes = [NativeLowering if x is shortcuts.Lowering else x for x in lowering.PASSES]
    monkeypatch.setattr(lowering, "PASSES", passes)
    monkeypatch.setattr(shortcuts, "Operators", lambda context: context)
    assert texts() == short
    assert sum("sdiv" in line for line in short) > 1


def _truncate(at: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = path.read_bytes()
        path.write_bytes(content[: int(at * len(content))])

    return damage


def _flip(at: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= 16
        path.write_bytes(content)

    return damage


def _make_a_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGE = {
    "empty": _truncate(0),
    **{f"cut at {at}": _truncate(at) for at in (0.001, 0.01, 0.3, 0.9, 0.999)},
    **{f"flipped at {at}": _flip(at) for at in (0, 0.02, 0.5, 0.999)},
    "garbage": lambda path: path.write_bytes(os.urandom(5000)),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "of another kernel": lambda path: store._replace(path, b"\0" * store.DIGEST_BYTES),
    "a directory": _make_a_directory,
    "not readable": lambda path: path.chmod(0),
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    "gone": Path.unlink,
    "gone with its directory": lambda path: shutil.rmtree(path.parent),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.filterwarnings("ignore:lockstep compiles its CPU kernels in memory")
def test_a_damaged_file_is_not_run_and_is_replaced(home, compilations, damage):
    _run()
    path = _file(home)
    damage(path)
    readable = path.is_file() and os.access(path, os.R_OK)
    assert _run() == 42
    # To root every file is readable.
    undamaged = damage is DAMAGE["not readable"] and readable
    assert len(compilations) == (1 if undamaged else 2)
    if not path.is_dir():
        compilations.clear()
        assert _run() == 42
        assert compilations == []
    assert [*home.iterdir()] == [path]


def test_nothing_can_be_written(tmp_path, monkeypatch, compilations):
    blocked = tmp_path / "file"
    blocked.touch()
    monkeypatch.setattr(store, "directories", lambda: [blocked, blocked / "below"])
    monkeypatch.setattr(store, "_warned", False)
    with pytest.warns(RuntimeWarning, match="in memory.*NUMBA_CACHE_DIR"):
        assert _run() == 42
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _run() == 42
    assert len(compilations) == 2
    assert store.home() is None
    assert doctor.compile_cache()["directory"] is None


def test_the_disk_is_full(home, monkeypatch, compilations):
    def write_a_part(path: Path, content: bytes) -> None:
        with path.open("wb") as file:
            file.write(content[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", write_a_part)
    with pytest.warns(RuntimeWarning, match="No space left"):
        assert _run() == 42
    assert [*home.iterdir()] == []


def test_the_next_directory_serves_where_the_first_does_not(tmp_path, monkeypatch, compilations):
    first, second = tmp_path / "first", tmp_path / "second"
    first.touch()
    monkeypatch.setattr(store, "directories", lambda: [first, second])
    assert [_run(), _run()] == [42, 42]
    assert len(compilations) == 1
    assert doctor.compile_cache()["directory"] == str(second)
    assert doctor.compile_cache()["kernels"] == 1


def test_code_is_looked_for_where_it_would_be_written(tmp_path, monkeypatch, compilations):
    first, second = tmp_path / "first", tmp_path / "second"
    monkeypatch.setattr(store, "directories", lambda: [second])
    _run()
    monkeypatch.setattr(store, "directories", lambda: [first, second])
    _run()
    assert len(compilations) == 2
    assert _file(first).name == _file(second).name


def test_the_directory_of_the_user_comes_first(tmp_path, monkeypatch):
    beside = Path(store.__file__).parents[1] / "__pycache__"
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    assert store.directories()[0] == beside
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert store.directories()[0].parent == tmp_path
    assert store.directories()[1] == beside


def test_code_of_older_sources_is_removed_and_that_of_other_machines_stays(home, compilations):
    _run()
    path = _file(home)
    kernel, here, sources = path.name.removesuffix(store.SUFFIX).rsplit(".", 2)
    other = path.with_name(f"{kernel}.{here[::-1]}.{sources}{store.SUFFIX}")
    path.rename(path.with_name(f"{kernel}.{here}.{sources[::-1]}{store.SUFFIX}"))
    other.touch()
    assert _run() == 42
    assert {*home.iterdir()} == {path, other}


def test_code_depends_on_every_source_of_the_package(tmp_path, monkeypatch):
    copy = tmp_path / "cpu"
    shutil.copytree(store.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(store, "PACKAGE", copy)
    keys = {store._key.__wrapped__()}
    for path in copy.rglob("*.py"):
        path.write_text(path.read_text() + "#")
        keys.add(store._key.__wrapped__())
    assert len(keys) == 1 + len(list(Path(cpu.__file__).parent.rglob("*.py")))


def test_a_long_compilation_is_reported_once(home, compilations, monkeypatch, capsys):
    monkeypatch.setattr(compiling, "PATIENCE", 0.0)
    monkeypatch.setattr(compiling, "_told", False)
    _run()
    assert capsys.readouterr().err.count("lockstep: compiling") == 1
    _file(home).unlink()
    _run()
    assert len(compilations) == 2
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("reason", ["quick", "loaded", "forked"])
def test_nothing_is_reported_without_a_wait(home, compilations, monkeypatch, capsys, reason):
    if reason == "loaded":
        _run()
    if reason == "forked":
        monkeypatch.setattr(forks, "forked", True)
    monkeypatch.setattr(compiling, "PATIENCE", 60.0 if reason == "quick" else 0.0)
    monkeypatch.setattr(compiling, "_told", False)
    _run()
    assert len(compilations) == 1
    assert capsys.readouterr().err == ""


CALL = """
import torch, lockstep
part = torch.randn(1, 2, 8, 16), torch.randn(1, 2, 8)
lockstep.merge([part, part])
"""


@pytest.mark.slow
def test_an_install_that_cannot_be_written_to(tmp_path):
    source = Path(lockstep.__file__).parent
    copy = tmp_path / "lockstep"
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns("__pycache__"))
    # Not even root can make directories of these.
    (copy / "kernels" / "cpu" / "__pycache__").touch()
    (tmp_path / "home").touch()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "HOME": str(tmp_path / "home")}
    for name in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME"):
        environment.pop(name, None)
    program = f"{CALL}\nfrom lockstep.cli import app\napp(['doctor'])"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("compiles its CPU kernels in memory") == 1
    assert "no directory can be written to" in done.stdout
