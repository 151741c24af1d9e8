"""The tests of the Triton forward in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
MODULES = (
    "test_triton_forward.py",
    "test_triton_forward_spans.py",
    "test_triton_split_kv.py",
    "test_triton_tf32.py",
    "test_hopper_line_up.py",
    "test_bad_metadata.py",
)

pytest.importorskip("triton")


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="is there already")
def test_triton_forward_in_the_interpreter():
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        command + [str(HERE / name) for name in MODULES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= 50
    assert "skipped" not in done.stdout, done.stdout
