"""Layers of a decoder with PyTorch's attention and with Lockstep's, on a GPU: docs/sdpa.md.

    PYTHONPATH=src python benchmarks/decoder_h200.py [--check]

The layers are plain PyTorch modules of the sizes of Llama 3 8B, which call
scaled_dot_product_attention as transformers does. Steps run as CUDA graphs, in turns; results are
compared first, and `--check` does no more than that. Writes
benchmarks/results/decoder-<gpu>.json.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.bench import pivot_tables
from lockstep.integrations import sdpa
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
HIDDEN, HQ, HKV, D, FFN, LAYERS = 4096, 32, 8, 128, 14336, 4
ROUNDS, REPEATS = 9, 10
# Sequences, keys before the step, tokens of the step.
CASES = [(1, 0, 4096), (1, 0, 16384), (1, 8192, 1), (16, 8192, 1)]


class Layer(nn.Module):
    """One layer whose cache has all keys but those of the step."""

    def __init__(self, B: int, before: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, (HQ + 2 * HKV) * D, bias=False)
        self.out = nn.Linear(HQ * D, HIDDEN, bias=False)
        self.up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)
        self.norms = nn.ModuleList(nn.RMSNorm(HIDDEN) for _ in range(2))
        self.before = before
        for name in ("k", "v"):
            cache = torch.randn(B, HKV, before + 1, D) if before else None
            self.register_buffer(name, cache)

    def forward(self, x: Tensor) -> Tensor:
        B, S, _ = x.shape
        heads = self.qkv(self.norms[0](x)).view(B, S, -1, D).transpose(1, 2)
        q, k, v = heads.split((HQ, HKV, HKV), 1)
        if self.before:
            self.k[:, :, self.before :] = k
            self.v[:, :, self.before :] = v
            k, v = self.k, self.v
        a = F.scaled_dot_product_attention(q, k, v, is_causal=S > 1, enable_gqa=True)
        x = x + self.out(a.transpose(1, 2).reshape(B, S, -1))
        gate, up = self.up(self.norms[1](x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def capture(model: nn.Module, x: Tensor) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    for _ in range(2):
        model(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = model(x)
    return graph, out


def milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graph.replay()
    start.record()
    for _ in range(REPEATS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / REPEATS


@torch.inference_mode()
def main() -> None:
    torch.set_default_device("cuda")
    torch.set_default_dtype(torch.bfloat16)
    rows = []
    for B, before, tokens in CASES:
        torch.manual_seed(0)
        model = nn.Sequential(*(Layer(B, before) for _ in range(LAYERS)))
        x = torch.randn(B, tokens, HIDDEN)
        plain, wanted = capture(model, x)
        with sdpa.active():
            ours, found = capture(model, x)
        plain.replay()
        ours.replay()
        torch.testing.assert_close(found, wanted, rtol=3e-2, atol=3e-2)
        if "--check" in sys.argv:
            continue
        turns = [(milliseconds(plain), milliseconds(ours)) for _ in range(ROUNDS)]
        figures = {
            "PyTorch, ms": median(a for a, _ in turns),
            "Lockstep, ms": median(b for _, b in turns),
            "times as fast": median(a / b for a, b in turns),
        }
        name = f"decode, {before} keys" if before else f"prefill, {tokens} tokens"
        common = {"step": name, "sequences": str(B)}
        rows += pivot_tables.rows_of(common, figures)
        print(common, figures, flush=True)
    if not rows:
        return
    run = results.collect("decoder", rows)
    caption = f"bf16, {LAYERS} layers of the sizes of Llama 3 8B, in CUDA graphs"
    run["tables"] = {
        "decoder_gpu": pivot_tables.table_of(["step", "sequences"], figures, 4, caption)
    }
    results.save_for_gpu(run, "decoder", ROOT / results.RESULTS)


if __name__ == "__main__":
    main()
