"""A kernel takes its folder and one line in KERNELS: everything else goes over that tuple."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest
import torch
from toy import KERNEL, RAN
from typer.testing import CliRunner

import lockstep
from lockstep import cli, dispatch, reference
from lockstep.bench import gpu, gpu_calls, gpu_cases, ours, timing

runner = CliRunner()


@pytest.fixture(autouse=True)
def _one_line(monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", (KERNEL, *dispatch.KERNELS))
    RAN.clear()


def draw(Sq: int = 9, Skv: int = 20) -> tuple[torch.Tensor, ...]:
    return torch.randn(2, 4, Sq, 8), torch.randn(2, 2, Skv, 8), torch.randn(2, 2, Skv, 8)


def test_dispatch_runs_what_it_takes_and_passes_on_what_it_refuses():
    q, k, v = draw()
    out, lse = lockstep.attention(q, k, v, causal=True, return_lse=True)
    exact = reference.attention(q, k, v, causal=True, return_lse=True)
    torch.testing.assert_close(out.double(), exact[0].double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact[1].double(), rtol=1e-5, atol=1e-5)
    assert len(RAN) == 1
    lockstep.attention(q, k, v, softcap=5.0)
    assert len(RAN) == 1
    with pytest.raises(NotImplementedError, match="toy: takes no option but"):
        lockstep.attention(q, k, v, softcap=5.0, kernel="toy")


def test_gradients_come_from_the_next_kernel():
    q, k, v = (x.requires_grad_() for x in draw())
    out = lockstep.attention(q, k, v)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    exact = torch.autograd.grad(reference.attention(q, k, v).sum(), (q, k, v))
    for found, expected in zip(grads, exact, strict=True):
        torch.testing.assert_close(found, expected.float(), rtol=1e-4, atol=1e-4)
    assert len(RAN) == 1


def test_merge_is_its_own(monkeypatch):
    merged = []

    def run(outs: list[torch.Tensor], lses: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        merged.append(len(outs))
        return KERNEL.merge.run(outs, lses)

    other = replace(KERNEL, merge=KERNEL.merge._replace(run=run))
    monkeypatch.setattr(dispatch, "KERNELS", (other, *dispatch.KERNELS))
    lockstep.merge([(torch.randn(2, 3, 4), torch.randn(2, 3))] * 2)
    lockstep.merge([(torch.randn(2, 3, 4).half(), torch.randn(2, 3))])
    assert merged == [2]


def test_explain_names_it():
    found = lockstep.explain(*draw())
    assert found.kernel == "toy"
    assert re.search(r"toy +runs", str(found))
    assert lockstep.explain(*draw(), softcap=5.0).refusals["toy"].startswith("takes no option")


def test_audits_hold_it_to_its_claims():
    small = ["--device", "cpu", "--seq", "40", "--batch", "2", "--repeats", "2", "--head-dim", "8"]
    bits = ["audit", "bits", *small, "--heads", "2", "--kv-heads", "1", "--kernel", "toy", "--json"]
    result = runner.invoke(cli.app, [*bits, "--dtype", "fp32"])
    assert result.exit_code == 0, result.output
    checks = json.loads(result.stdout)["checks"]
    assert {check["kernel"] for check in checks} == {"toy"}
    assert any(check["comparisons"] for check in checks if check["claim"] == "deterministic")
    assert not any(check["comparisons"] for check in checks if check["claim"] == "batch_invariant")
    assert RAN


def test_the_bench_has_a_column_of_it(monkeypatch):
    empty, zeros = torch.empty, torch.zeros
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch, "empty", lambda *sizes, device, dtype: empty(*sizes, dtype=torch.float32)
    )
    monkeypatch.setattr(torch, "zeros", lambda *sizes, device, dtype: zeros(*sizes, dtype=dtype))
    found = gpu.kernels()
    monkeypatch.undo()
    monkeypatch.setattr(dispatch, "KERNELS", (KERNEL, *dispatch.KERNELS))
    assert found[0] is KERNEL
    monkeypatch.setattr(gpu_calls, "_normal", lambda *sizes: torch.randn(*sizes))
    monkeypatch.setattr(
        gpu, "take_turns", lambda calls, rounds: timing.Timings({n: [1e-3] * rounds for n in calls})
    )
    case = gpu_cases.Case("forward", 64, 16, 2, 2, 1, causal=True)
    row = gpu.run(case, ours.contenders([KERNEL]), rounds=1).as_json()
    assert set(row["ms"]) == {"toy"}
    assert row["error"]["toy"] <= 1


def test_the_doctor_says_what_it_claims_and_refuses():
    result = runner.invoke(cli.app, ["doctor", "--json"])
    first = json.loads(result.stdout)["kernels"][0]
    assert (first["name"], first["backward"]) == ("toy", False)
    assert (first["deterministic"], first["batch_invariant"]) == (True, False)
    assert first["refusals"]["cpu fp32"] is None
    assert first["refusals"]["cpu bf16"] == "takes float32 on a CPU"
    printed = runner.invoke(cli.app, ["doctor"], env={"COLUMNS": "200"}).stdout
    assert "toy  runs cpu fp32" in printed
