"""Runs test modules in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

not_there_already = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="is there already"
)


def assert_they_pass(*modules: str, at_least: int) -> None:
    """All tests of these modules that need no GPU, and that many of them."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu"]
    done = subprocess.run(
        command + [str(HERE / name) for name in modules],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout
    assert int(passed[1]) >= at_least
    assert "skipped" not in done.stdout, done.stdout
