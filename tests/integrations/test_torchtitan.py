"""Packed documents as torchtitan's layers have them; its own model where it is installed."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import lockstep
from lockstep.integrations.torchtitan import Layer

ENDS = [0, 7, 20, 32]  # documents among 2 x 16 tokens


def metadata():
    offsets = torch.tensor(ENDS, dtype=torch.int32)
    return SimpleNamespace(cu_seq_q=offsets, cu_seq_k=offsets, max_q=13, max_k=13)


@pytest.mark.parametrize("window", [(-1, 0), (4, 0), (-1, -1)])
def test_each_document_by_itself(window):
    layer = Layer()
    layer.window_size = window
    q, k, v = (torch.randn(2, 16, heads, 16) for heads in (4, 2, 2))
    out = layer.forward(q, k, v, attention_masks=metadata(), enable_gqa=True)
    sides = tuple(None if side < 0 else side for side in window)
    for start, end in pairwise(ENDS):
        own = (x.flatten(0, 1)[start:end].transpose(0, 1)[None] for x in (q, k, v))
        expected = lockstep.attention(*own, window=sides)[0].transpose(0, 1)
        assert torch.equal(out.flatten(0, 1)[start:end], expected)


def test_what_comes_behind_attention_gets_the_lse():
    layer = Layer()
    layer.window_size = (-1, 0)
    q = torch.randn(2, 16, 4, 16)
    given = {"attention_masks": metadata(), "scale": 0.3}
    found = layer.forward(q, q, q, out_transform=lambda out, lse: (out, lse), **given)
    assert torch.equal(found[0], layer.forward(q, q, q, **given))
    assert found[1].shape == (2, 16, 4)


def test_a_model_of_torchtitan():
    config = pytest.importorskip("torchtitan.config", exc_type=ImportError)
    from torchtitan.models.common.attention import create_varlen_metadata_for_document
    from torchtitan.models.llama3 import model_registry

    built = model_registry("debugmodel", attn_backend="varlen").model
    imports = ["lockstep.integrations.torchtitan.attention"]
    applied = config.apply_overrides(config.OverrideConfig(imports=imports), built)
    model = built.build()
    assert len(applied) == len(model.layers)
    with torch.no_grad():
        model.init_states()
    tokens = torch.randint(0, 100, (1, 32))
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(ENDS)])[None]
    masks = create_varlen_metadata_for_document(positions)
    logits = model(tokens, positions, masks)
    for start, end in pairwise(ENDS):
        own = positions[:, start:end]
        alone = model(tokens[:, start:end], own, create_varlen_metadata_for_document(own))
        torch.testing.assert_close(logits[:, start:end], alone, rtol=1e-4, atol=1e-4)
    logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
