"""The audit of models: it finds what was planted, and says that ours is the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import lockstep.audit
from lockstep.audit.model_bits import Finding, model
from lockstep.audit.model_trace import Difference, Place
from lockstep.cli import app

sys.path.insert(0, str(Path(__file__).parents[1] / "integrations"))


class Exact(nn.Module):
    """Sums rows one element after the other, whatever the batch."""

    def forward(self, x):
        total = torch.zeros(x.shape[:-1])
        for i in range(x.shape[-1]):
            total = total + x[..., i]
        return total[..., None] * x


class SumsByBatch(nn.Module):
    """The planted defect: another order of summation for a batch."""

    def forward(self, x):
        if x.shape[0] == 1:
            return x.sum(-1, keepdim=True) * x
        return x.flip(-1).cumsum(-1)[..., -1:] * x


def test_a_planted_difference_is_found_where_it_is():
    torch.manual_seed(0)
    stack = nn.Sequential(Exact(), SumsByBatch(), Exact())
    findings = model(stack, torch.randn(5, 37, 101))
    assert [finding.same for finding in findings] == [False, False]
    for finding in findings:
        assert finding.module.path == "1"
        assert finding.module.name == "SumsByBatch"
        assert finding.operator.name == "aten.mul.Tensor"
        assert 0 < finding.operator.largest < 1e-2


class Attends(nn.Module):
    """What differs is no module of its own: a product before the last layer."""

    def __init__(self):
        super().__init__()
        self.before, self.after = Exact(), Exact()

    def forward(self, x):
        x = self.before(x)
        return self.after(SumsByBatch()(x))


def test_what_no_module_computes_is_found_in_the_one_around_it():
    findings = model(nn.Sequential(Attends()), torch.randn(5, 37, 101))
    assert {finding.module.path for finding in findings} == {"0"}


def test_what_is_the_same_is_said_to_be():
    findings = model(nn.Sequential(Exact(), nn.ReLU()), torch.randn(5, 37, 11))
    assert all(finding.same for finding in findings)


class OfTokens(nn.Module):
    """Takes tokens and nothing else."""

    def __init__(self):
        super().__init__()
        self.embed, self.sum = nn.Embedding(100, 11), Exact()

    def forward(self, input_ids):
        return self.sum(self.embed(input_ids))


def test_a_model_without_a_mask_is_not_padded():
    findings = model(OfTokens(), {"input_ids": torch.randint(0, 100, (5, 37))})
    assert [finding.circumstance for finding in findings] == [
        "sequence 0 alone and in a batch of 5",
        "sequence 4 alone and in a batch of 5",
    ]
    assert all(finding.same for finding in findings)


def test_it_is_a_name_of_the_package():
    assert lockstep.audit.model is model
    with pytest.raises(AttributeError, match="nosuch"):
        lockstep.audit.nosuch  # noqa: B018


def test_training_mode_comes_back():
    layer = nn.Sequential(Exact(), nn.Dropout(0.5)).train()
    assert all(finding.same for finding in model(layer, torch.randn(3, 7, 5)))
    assert layer.training


def test_bad_inputs():
    with pytest.raises(ValueError, match="two sequences"):
        model(nn.ReLU(), torch.randn(1, 4))
    with pytest.raises(ValueError, match="no tensor"):
        model(nn.ReLU(), {})


def test_places():
    place = Place(B=5, b=2, S=7, start=3, n=4, end=7)
    large = torch.arange(5 * 7 * 2).view(5, 7, 2)
    assert torch.equal(place.find(large, torch.empty(1, 4, 2)), large[2:3, 3:7])
    flat = large.view(35, 2)
    assert torch.equal(place.find(flat, torch.empty(4, 2)), large[2, 3:7])
    assert place.find(large, torch.empty(1, 3, 2)) is None
    assert place.find(large, torch.empty(4, 2)) is None


def test_remedies():
    def remedy(name):
        difference = Difference("layer", name, 1, 1, 1.0)
        return Finding("", difference, difference).remedy

    assert "lockstep" in remedy("aten._scaled_dot_product_flash_attention_for_cpu.default")
    assert "matrix product" in remedy("aten.addmm.default")
    assert remedy("aten.mystery.default") is None


@pytest.fixture
def folder(tmp_path):
    pytest.importorskip("transformers")
    import tiny_models

    tiny_models.make("llama").config.save_pretrained(tmp_path)
    return tmp_path


def test_the_command(folder):
    result = CliRunner().invoke(app, ["audit", "model", str(folder), "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == (0 if found["ok"] else 1)
    names = [x["circumstance"] for x in found["findings"]]
    assert len(names) == 5
    assert any("left" in name for name in names)
    assert any("chunks" in name for name in names)
    for finding in found["findings"]:
        # Matrix products of this machine's BLAS may differ; our attention never does.
        if finding["operator"] is not None:
            assert "lockstep" not in finding["operator"]["name"]


def test_the_command_prints_a_line_for_each_circumstance(folder):
    result = CliRunner().invoke(app, ["audit", "model", str(folder), "--attention", "sdpa"])
    assert result.exit_code in (0, 1)
    assert result.stdout.count("sequence 0") == 3


def test_the_command_refuses(tmp_path):
    result = CliRunner().invoke(app, ["audit", "model", str(tmp_path)])
    assert result.exit_code == 2
    assert "config.json" in result.stderr


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        pytest.param("t5", (0, 1), "", marks=pytest.mark.slow),
        ("vit", (2,), "takes pixel_values"),
        ("whisper", (2,), "--seq 37"),
    ],
)
def test_the_command_with_encoders(name, status, said, tmp_path):
    """An encoder takes no chunks, pixels are no tokens, and some models take few of them."""
    pytest.importorskip("transformers")
    import tiny_models

    tiny_models.make(name).save_pretrained(tmp_path)
    result = CliRunner().invoke(app, ["audit", "model", str(tmp_path)])
    assert result.exit_code in status
    assert said in result.stderr
    assert "chunks" not in result.stdout


def test_the_command_names_a_bad_device(folder):
    result = CliRunner().invoke(app, ["audit", "model", str(folder), "--device", "banana"])
    assert result.exit_code == 2
    assert "--device" in result.stderr
