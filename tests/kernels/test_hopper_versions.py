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


# Versions between the first and the last compile a kernel with every name that moved, and what one
# of them once could not. The last compiles all kernels, some of them up to Triton's own code.
OTHERS = (
    "wide backward",
    "few keys",
    "one block",
    "decode",
    "decode of few rows",
    "spans of decode",
)


@pytest.mark.parametrize(
    ("version", "kernels", "others"),
    [
        ("3.7.1", ("backward",), ()),
        ("3.8.0", ("wide backward",), ()),
        ("3.9.0", ("forward", "backward"), OTHERS),
    ],
)
def test_kernels_compile(version, kernels, others):
    other = TRITONS / version
    if not (other / "triton").is_dir():
        pytest.skip(f"no Triton {version}: `make tritons` installs it beside the one in use")
    path = os.pathsep.join(map(str, (other, ROOT / "src", HERE)))
    program = HERE / "compile_hopper.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(program), *kernels, "--to-layouts", *others],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert found["triton"] == version
    assert found["products"].keys() == {*kernels, *others}
    assert all(n > 0 for n in found["products"].values()), found
    assert not found["serialized"]
    assert found["parameters"]
    assert found["barriers"].keys() == {"backward"}.intersection(kernels)
    assert all(n < FIRST_FREE.value for n in found["barriers"].values()), found
