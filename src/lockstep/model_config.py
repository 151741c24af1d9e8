"""The attention layers that a transformers config.json describes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from lockstep.models import Layer

# Models of which every layer has sinks.
WITH_SINKS = frozenset({"gpt_oss"})
ENCODERS = frozenset({"bert", "roberta", "modernbert", "vit", "siglip_vision_model", "clip"})


def read(path: Path) -> tuple[dict[str, Layer], torch.dtype]:
    """Kinds of layer by name, "global" and "local", and the dtype of the weights.

    Raises:
        ValueError: The file is no configuration with attention heads.
        OSError: It cannot be read.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{path} takes a JSON object, got {type(config).__name__}")
    # Models for images and text have that of the text inside.
    config = config.get("text_config") or config
    heads = config.get("num_attention_heads")
    if not isinstance(heads, int):
        raise ValueError(f"{path} has no num_attention_heads")
    return _layers(config, heads), _dtype(config)


def _layers(config: dict[str, Any], heads: int) -> dict[str, Layer]:
    D, Dv = _head_dims(config, heads)
    scalar = config.get("query_pre_attn_scalar")
    causal = config.get("model_type") not in ENCODERS
    # Positions that are stretched reach further.
    longest = None if config.get("rope_scaling") else config.get("max_position_embeddings")

    def layer(window: int | None) -> Layer:
        return Layer(
            heads,
            config.get("num_key_value_heads") or heads,
            D,
            Dv,
            causal,
            None if window is None else (window - 1, 0) if causal else (window // 2, window // 2),
            None if scalar is None else float(scalar) ** -0.5,
            config.get("attn_logit_softcapping"),
            config.get("model_type") in WITH_SINKS,
            lengths=None if longest is None else (1, longest),
        )

    window = config.get("sliding_window") or config.get("local_attention")
    if config.get("use_sliding_window") is False:
        window = None
    if window is None:
        return {"global": layer(None)}
    kinds = set(config.get("layer_types") or ())
    is_mixed = "full_attention" in kinds or bool(
        {"sliding_window_pattern", "global_attn_every_n_layers", "attn_logit_softcapping"}
        & config.keys()
    )
    return {"local": layer(window)} | ({"global": layer(None)} if is_mixed else {})


def _head_dims(config: dict[str, Any], heads: int) -> tuple[int, int]:
    """D, and Dv if it is another."""
    if config.get("qk_nope_head_dim"):
        return config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"]
    return config.get("head_dim") or config["hidden_size"] // heads, 0


def _dtype(config: dict[str, Any]) -> torch.dtype:
    found = getattr(torch, str(config.get("dtype") or config.get("torch_dtype")), None)
    return found if isinstance(found, torch.dtype) else torch.bfloat16
