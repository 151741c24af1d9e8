"""A small Llama of transformers with sdpa and with lockstep, on this CPU: docs/transformers.md.

    PYTHONPATH=src python benchmarks/transformers_cpu.py

Needs the extra `hf`. Both take turns, and their logits are compared first. Writes
benchmarks/results/transformers-cpu.json.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

from lockstep.bench import pivot_tables
from lockstep.bench.timing import interleave
from lockstep.integrations import transformers as integration
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
IMPLEMENTATIONS = ("sdpa", "lockstep")
ROUNDS = 9
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "max_position_embeddings": 8192,
}
# Sequences, keys before the step, tokens of the step, whether sequences are padded on the left.
CASES = [
    (1, 0, 1024, False),
    (4, 0, 512, True),
    (1, 4096, 1, False),
    (8, 1024, 1, True),
]


def make(implementation: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES)
    return LlamaForCausalLM._from_config(config, attn_implementation=implementation).eval()


def step_of(
    model: LlamaForCausalLM, B: int, before: int, tokens: int, padded: bool
) -> Callable[[], torch.Tensor]:
    """Runs one step; what it adds to the cache goes again. Returns the logits of the last token."""
    torch.manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (B, before + tokens))
    mask = None
    if padded:
        first = torch.arange(B) * (before + tokens) // (2 * B)
        mask = (torch.arange(before + tokens) >= first[:, None]).long()
    cache = DynamicCache(config=model.config) if before else None
    if cache is not None:
        earlier = None if mask is None else mask[:, :before]
        model(ids[:, :before], attention_mask=earlier, past_key_values=cache, logits_to_keep=1)

    def step() -> torch.Tensor:
        out = model(
            ids[:, before:],
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=1,
        ).logits
        if cache is not None:
            cache.crop(-tokens)
        return out

    return step


@torch.inference_mode()
def main() -> None:
    integration.register()
    models = {name: make(name) for name in IMPLEMENTATIONS}
    rows = []
    for case in CASES:
        B, before, tokens, padded = case
        steps = {name: step_of(model, *case) for name, model in models.items()}
        torch.testing.assert_close(steps["lockstep"](), steps["sdpa"](), rtol=1e-3, atol=1e-4)
        timings = interleave(steps, ROUNDS)
        name = f"decode, {before} keys" if before else f"prefill, {tokens} tokens"
        sequences = f"{B}, padded on the left" if padded else str(B)
        common = {"step": name, "sequences": sequences}
        figures = {f"{x}, ms": timings.median(x) * 1e3 for x in IMPLEMENTATIONS}
        figures["times as fast"] = timings.speed("lockstep", against="sdpa")
        rows += pivot_tables.rows_of(common, figures)
        print(common, figures)
    run = results.collect("transformers-cpu", rows)
    caption = "fp32, a Llama of 4 layers, 8 query heads and 2 key heads of 64"
    run["tables"] = {
        "transformers_cpu": pivot_tables.table_of(["step", "sequences"], figures, 4, caption)
    }
    results.write(run, ROOT / results.RESULTS / "transformers-cpu.json")


if __name__ == "__main__":
    main()
