"""`lockstep audit distributed`, as a user runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner
from worlds import SOURCE

from lockstep import cli
from lockstep.audit import distributed_cli

AUDIT = ("-m", "lockstep.cli", "audit", "distributed", "--seq", "70", "--head-dim", "32", "--json")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        (sys.executable, *command), env=environment, capture_output=True, text=True, timeout=200
    )


@pytest.mark.slow
def test_two_ranks_under_torchrun():
    mask = ("--mask", "both")  # `test_bits.py` has them all
    ended = run("-m", "torch.distributed.run", "--nproc-per-node", "2", *AUDIT, *mask)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["ok"]
    assert found["ranks"] == 2
    # Three methods, two kinds of shards.
    assert len(found["cases"]) == 6
    assert found["not_audited"] == {}


def test_every_method_shard_and_mask_by_default(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    found = distributed_cli._prepare(None, None, None, "cpu", None, (70, 4, 2, 32))
    assert len({(case.method, case.balanced, case.mask) for case in found}) == 3 * 2 * 5


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("kernel", [(), ("--kernel", "hopper")], ids=["default", "hopper"])
def test_ranks_on_one_gpu(kernel):
    """They exchange through host memory; Triton and, with heads, Hopper kernels compute."""
    options = ("--seq", "1000", "--head-dim", "64", "--mask", "causal", "--mask", "both", *kernel)
    ended = run("-m", "torch.distributed.run", "--nproc-per-node", "2", *AUDIT, *options)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    assert len(json.loads(ended.stdout)["cases"]) == (4 if kernel else 12)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--mask", "none"), "--mask takes one of full, causal"),
        (("--kernel", "none"), "kernel takes one of hopper"),
        (("--kernel", "oracle", "--method", "ring"), "--method takes heads with oracle"),
    ],
    ids=["mask", "kernel", "method"],
)
def test_options_that_do_not_fit_are_named(options, said):
    """Before any rank is looked for."""
    ended = CliRunner().invoke(cli.app, ["audit", "distributed", *options], env={"RANK": "0"})
    assert ended.exit_code == 2
    assert said in " ".join(ended.stderr.split())


def test_without_ranks_it_says_how_to_run_it():
    ended = CliRunner().invoke(cli.app, ["audit", "distributed"], env={"RANK": None})
    assert ended.exit_code == 2
    assert "torchrun" in ended.stderr
