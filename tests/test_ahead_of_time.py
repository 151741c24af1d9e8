"""Builds that are compiled before, on a machine without a GPU, and found elsewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

HERE = Path(__file__).resolve().parent
SCRIPT = str(HERE / "ahead_of_time.py")
TOY = f"""
import ahead_of_time, pickle, sys
sys.path[:0] = [{str(HERE / "kernels")!r}]
ahead_of_time.fix_keys()
ahead_of_time.pretend_h200()
from lockstep.kernels.compile_apart import BuildApart
from toy_kernel import ARGUMENTS, toy
build = BuildApart.of(toy, ARGUMENTS, {{"num_warps": 4}}).compile
"""


def run(*command: str, **variables: str) -> str:
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE), str(HERE / "kernels")])
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables
    ended = subprocess.run(
        (sys.executable, *command), env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr + ended.stdout
    return ended.stdout


@pytest.mark.slow
def test_a_build_is_found_where_its_folder_has_been_moved(tmp_path):
    builds, cache, moved = tmp_path / "builds.pkl", tmp_path / "cache", tmp_path / "moved"
    save = "pickle.dump([('toy', build)], open(sys.argv[1], 'wb'))"
    run("-c", TOY + save, str(builds))
    assert "1 of 1 builds" in run(SCRIPT, "compile", str(cache), str(builds), "--processes", "1")
    cache.rename(moved)
    before = {path: path.stat().st_mtime_ns for path in moved.glob("*/*")}
    assert {path.suffix for path in before} == {".cubin", ".json", ".ptx"}
    run("-c", TOY + "build()", TRITON_CACHE_DIR=str(moved))
    assert {path: path.stat().st_mtime_ns for path in moved.glob("*/*")} == before


@pytest.mark.slow
def test_tests_and_cases_are_planned_without_a_gpu(tmp_path):
    to, tests = str(tmp_path / "builds.pkl"), str(HERE / "kernels" / "test_capped_weights_gpu.py")
    printed = run("-O", SCRIPT, "plan", to, tests, "--case", "models:decode")
    assert "builds in" in printed
    names = "import pickle, sys; print({name for name, _ in pickle.load(open(sys.argv[1], 'rb'))})"
    found = run("-c", names, to)
    assert {"forward_kernel", "decode_kernel"} <= set(re.findall(r"\w+", found))
