"""Small models of many kinds with random weights: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import torch
import transformers

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 120,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 119,
}
DECODER = {**COMMON, "num_key_value_heads": 2, "head_dim": 16}
LAYERS = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
# By name: the class, the class of its configuration, and the configuration.
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", DECODER),
    "gemma2": (
        "Gemma2ForCausalLM",
        "Gemma2Config",
        {**DECODER, **LAYERS, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        {**DECODER, **LAYERS, "query_pre_attn_scalar": 16},
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        {**DECODER, **LAYERS, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**DECODER, "sliding_window": 8}),
}
SPARSE = {
    **COMMON,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "index_topk": 6,
    "index_n_heads": 2,
    "index_head_dim": 16,
}
# Models that use their mask for more than a call of the attention interface.
MASK_USERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "doge": ("DogeForCausalLM", "DogeConfig", DECODER),
    "deepseek_v32": ("DeepseekV32ForCausalLM", "DeepseekV32Config", SPARSE),
    "bloom": ("BloomForCausalLM", "BloomConfig", {**COMMON, "n_layer": 2, "n_head": 4}),
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": (
        "BertModel",
        "BertConfig",
        {**COMMON, "attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0},
    ),
    "modernbert": (
        "ModernBertModel",
        "ModernBertConfig",
        {
            **COMMON,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "cls_token_id": 2,
            "sep_token_id": 3,
        },
    ),
}
T5 = {
    "d_model": 64,
    "d_kv": 16,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": 4,
    "vocab_size": 120,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
WHISPER = {
    "d_model": 64,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "vocab_size": 120,
    "num_mel_bins": 8,
    "max_source_positions": 20,
    "max_target_positions": 30,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
OTHERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5ForConditionalGeneration", "T5Config", T5),
    "whisper": ("WhisperForConditionalGeneration", "WhisperConfig", WHISPER),
    "vit": (
        "ViTModel",
        "ViTConfig",
        {
            **{name: COMMON[name] for name in list(COMMON)[:4]},
            "image_size": 32,
            "patch_size": 8,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
    ),
}
ALL = {**DECODERS, **MASK_USERS, **ENCODERS, **OTHERS}


def make(name: str, implementation: str = "eager") -> Any:
    """A model in evaluation mode; the same weights each time."""
    model_class, config_class, sizes = ALL[name]
    torch.manual_seed(1)
    config = getattr(transformers, config_class)(**sizes)
    model = getattr(transformers, model_class)._from_config(
        config, attn_implementation=implementation
    )
    if name == "gpt_oss":
        for layer in model.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    return model.eval()


def padding(side: str | None, B: int, S: int) -> torch.Tensor | None:
    """[B, S] of ones with up to half of a row missing on one side."""
    if side is None:
        return None
    mask = torch.ones(B, S, dtype=torch.long)
    for b in range(B):
        n = b * S // (2 * B)
        mask[b, S - n :] = 0
    return mask.flip(1) if side == "left" else mask


def inputs_of(name: str, side: str | None = None, B: int = 3, S: int = 20) -> dict[str, Any]:
    """What a model is called with."""
    torch.manual_seed(2)
    if name == "vit":
        return {"pixel_values": torch.randn(B, 3, 32, 32)}
    ids = torch.randint(4, 119, (B, S))
    if name == "whisper":
        return {"input_features": torch.randn(B, 8, 40), "decoder_input_ids": ids[:, :9]}
    mask = padding(side, B, S)
    given = {"input_ids": ids, "attention_mask": mask}
    if name == "t5":
        given["decoder_input_ids"] = ids[:, :7]
    return given


def output_of(model: Any, given: dict[str, Any]) -> torch.Tensor:
    """Logits or hidden states [tokens, ·], those of padding left out."""
    result = model(**given)
    x = result.logits if hasattr(result, "logits") else result.last_hidden_state
    mask = given.get("attention_mask")
    return x.flatten(0, 1) if mask is None or mask.shape != x.shape[:2] else x[mask.bool()]


def output_and_gradients(model: Any, given: dict[str, Any]) -> tuple[torch.Tensor, Any]:
    model.zero_grad()
    out = output_of(model, given)
    out.sin().sum().backward()
    return out.detach(), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }
