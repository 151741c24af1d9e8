"""`lockstep audit bits`: exit statuses, JSON, and what a difference looks like."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from kernel_calls import forward as run_forward
from kernel_calls import preparing
from typer.testing import CliRunner

from lockstep import cli, dispatch
from lockstep.kernels import cpu

runner = CliRunner()
SMALL = ["audit", "bits", "--device", "cpu", "--seq", "40", "--batch", "2", "--repeats", "2"]
SMALL += ["--heads", "2", "--kv-heads", "1", "--head-dim", "8"]


def test_it_holds_here():
    result = runner.invoke(cli.app, SMALL)
    assert result.exit_code == 0, result.output
    assert "Every bit is the same." in result.stdout


def test_json_is_alone_on_stdout():
    result = runner.invoke(cli.app, [*SMALL, "--dtype", "fp16", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["ok"] is True
    assert found["shape"]["dtype"] == "float16"
    assert {check["kernel"] for check in found["checks"]} == {"cpu"}
    assert all(check["ok"] for check in found["checks"])
    assert found["not_audited"]["oracle"].startswith("takes float64")


def test_what_a_kernel_refuses_is_said(monkeypatch):
    def supports(problem):
        return "takes no pages" if problem.layout == "paged" else cpu.KERNEL.supports(problem)

    refuses = replace(cpu.KERNEL, name="choosy", supports=supports, query_invariant=False)
    never = replace(cpu.KERNEL, name="absent", supports=lambda problem: "needs another machine")
    forward_only = replace(refuses, name="forward", supports_backward=lambda problem: "too deep")
    monkeypatch.setattr(dispatch, "KERNELS", (refuses, never, forward_only))
    result = runner.invoke(cli.app, SMALL, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "takes no pages" in result.stdout
    assert "not claimed" in result.stdout
    assert "absent is not audited: needs another machine" in result.stdout
    assert "left out: no gradients: too deep" in result.stdout


def test_a_difference_ends_it_with_status_1_and_its_place(monkeypatch):
    turns = iter(range(100))

    def forward(problem, tensors):
        out, *rest = run_forward(cpu.KERNEL, problem, tensors)
        return out + 1e-3 * next(turns), *rest

    kernel = replace(cpu.KERNEL, name="fickle", prepare=preparing(forward))
    monkeypatch.setattr(dispatch, "KERNELS", (kernel,))
    result = runner.invoke(cli.app, SMALL)
    assert result.exit_code == 1
    assert "fickle: the same call again: plain, call 2" in result.stdout
    assert "out[0, 0, 0, 0]: expected" in result.stdout
    found = json.loads(runner.invoke(cli.app, [*SMALL, "--json"]).stdout)
    assert found["checks"][-1]["difference"]["index"] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "int3"], "--dtype takes one of fp16"),
        (["--kernel", "abacus"], "--kernel takes one of"),
        (["--seq", "2"], "--seq takes at least 16, got 2"),
        (["--seq", "-1"], "--seq takes at least 16, got -1"),
        (["--seq", "99999999999"], "--batch · --heads · --seq · --head-dim takes up to"),
        (["--batch", "0"], "--batch takes at least 1, got 0"),
        (["--heads", "0"], "--heads takes at least 1, got 0"),
        (["--heads", "3", "--kv-heads", "2"], "--heads takes a multiple of --kv-heads = 2, got 3"),
        (["--kv-heads", "-2"], "--kv-heads takes at least 1, got -2"),
        (["--head-dim", "0"], "--head-dim takes at least 1, got 0"),
        (["--repeats", "0"], "--repeats takes at least 1, got 0"),
        (["--device", "banana"], "--device takes cpu, cuda or cuda:N, got 'banana'"),
        (["--device", "mps"], "--device takes cpu, cuda or cuda:N, got 'mps'"),
        (["--device", "cpu:1"], "--device takes cpu, cuda or cuda:N, got 'cpu:1'"),
        (["--device", "cuda:x"], "--device takes cpu, cuda or cuda:N, got 'cuda:x'"),
        (["--kernel", "oracle"], "oracle: takes float64"),
        (["--kernel", "oracle", "--dtype", "fp64"], "claims nothing about bits"),
    ],
)
def test_what_cannot_run_is_a_usage_error(arguments, message):
    result = runner.invoke(cli.app, [*SMALL, *arguments])
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert message in result.stderr.replace("\n", " ")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_no_cuda_is_said_plainly():
    result = runner.invoke(cli.app, ["audit", "bits", "--device", "cuda"])
    assert result.exit_code == 2
    assert "needs a CUDA device" in result.stderr
