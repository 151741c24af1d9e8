"""The Hopper kernels compile with every version of Triton that Lockstep works with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from lockstep.kernels.hopper.common.named_barriers import FIRST_FREE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# `make tritons` puts them there, each in a directory of its own.
TRITONS = ROOT / ".venv" / "tritons"


@pytest.mark.parametrize("version", ["3.7.1", "3.8.0", "3.9.0"])
def test_kernels_compile(version):
    other = TRITONS / version
    if not (other / "triton").is_dir():
        pytest.skip(f"no Triton {version}: `make tritons` installs it beside the one in use")
    path = os.pathsep.join(map(str, (other, ROOT / "src", HERE)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "compile_hopper.py")],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["triton"] == version
    assert all(n > 0 for n in found["products"].values()), found
    assert not found["serialized"]
    assert found["parameters"]
    assert found["barriers"] < FIRST_FREE.value
