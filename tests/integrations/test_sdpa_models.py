"""Models of other libraries run unchanged with Lockstep behind scaled_dot_product_attention."""

from __future__ import annotations

import pytest
import torch

import lockstep
from lockstep.integrations import sdpa

pytestmark = pytest.mark.skipif(
    not hasattr(torch.nn.attention, "register_flash_attention_impl"), reason="needs torch 2.11"
)


@pytest.fixture
def assert_unchanged(monkeypatch):
    """Runs a model with PyTorch's attention and with Lockstep's, gradients included."""
    calls = []
    original = lockstep.attention
    monkeypatch.setattr(
        lockstep, "attention", lambda *a, **b: (calls.append(b), original(*a, **b))[1]
    )

    def check(model, run, expected):
        parameters = list(model.parameters())
        results = []
        for activated in (False, True):
            with sdpa.active() if activated else torch.enable_grad():
                out = run(model)
                grads = torch.autograd.grad(out.sin().sum(), parameters, allow_unused=True)
            results.append((out, [x for x in grads if x is not None]))
        assert len(calls) == expected
        (wanted, wanted_grads), (found, grads) = results
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        largest = max(float(x.abs().max()) for x in wanted_grads)
        for a, b in zip(grads, wanted_grads, strict=True):
            assert (a - b).abs().max() <= 1e-5 * largest

    return check


@pytest.mark.slow
def test_a_unet_of_diffusers(assert_unchanged):
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
        cross_attention_dim=32,
        attention_head_dim=8,
        norm_num_groups=8,
    )
    given = (torch.randn(2, 4, 8, 8), 3, torch.randn(2, 7, 32))
    assert_unchanged(model, lambda model: model(*given).sample, expected=8)


def test_flux_of_diffusers(assert_unchanged):
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    )
    given = {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 7, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.tensor([1.0]),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    assert_unchanged(model, lambda model: model(**given).sample, expected=2)


def test_a_vision_transformer_of_timm(assert_unchanged):
    models = pytest.importorskip(
        "timm.models.vision_transformer",
        reason="needs timm, and a torchvision built for this torch",
        exc_type=ImportError,
    )
    model = models.VisionTransformer(
        img_size=32, patch_size=8, embed_dim=64, depth=2, num_heads=4, num_classes=7
    )
    image = torch.randn(2, 3, 32, 32)
    assert_unchanged(model, lambda model: model(image), expected=2)


@pytest.mark.parametrize("keys", ["self", "cross"])
def test_multihead_attention_with_padding(keys, assert_unchanged):
    model = torch.nn.MultiheadAttention(64, 4, batch_first=True)
    x = torch.randn(2, 10, 64)
    other = x if keys == "self" else torch.randn(2, 13, 64)
    padding = torch.arange(other.shape[1]) >= torch.tensor([[9], [5]])

    def run(model):
        return model(x, other, other, key_padding_mask=padding, need_weights=False)[0]

    assert_unchanged(model, run, expected=1)
