"""float32 attention by Lockstep and by PyTorch's memory-efficient kernel: docs/triton.md.

    PYTHONPATH=src python benchmarks/float32_h200.py [--check]

Each contender runs with float32 products and with tf32 ones, in turns. Results are first held
against the error rule, and `--check` does no more than that. Writes
benchmarks/results/float32-<gpu>.json.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import lockstep
from lockstep import error_rule
from lockstep.bench.gpu_timing import take_turns
from lockstep.output import results
from lockstep.problem import Options, Tensors, describe

ROOT = Path(__file__).resolve().parents[1]
TOKENS, COLUMNS, ROUNDS = 8192, 2048, 4
CASES = [(D, S, causal) for D in (64, 128, 256) for S in (1024, 4096) for causal in (False, True)]
Attend = Callable[..., Tensor]


def ours(allow_tf32: bool, *qkv: Tensor, causal: bool) -> Tensor:
    return lockstep.attention(*qkv, causal=causal, allow_tf32=allow_tf32, kernel="triton")


def efficient(allow_tf32: bool, *qkv: Tensor, causal: bool) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = allow_tf32
    with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
        return scaled_dot_product_attention(*qkv, is_causal=causal)


CONTENDERS: dict[str, Attend] = {
    "float32": partial(ours, False),
    "SDPA, float32": partial(efficient, False),
    "allow_tf32": partial(ours, True),
    "SDPA, tf32": partial(efficient, True),
}
# Of each table, the contenders, and what its caption calls their tensors.
TABLES = {
    "float32": (("float32", "SDPA, float32"), "float32 tensors"),
    "triton_tf32": (("allow_tf32", "SDPA, tf32"), "float32 tensors with allow_tf32"),
}
FLAGS = {"SDPA, float32": False, "SDPA, tf32": True}


def gradient(
    attend: Attend, tensors: list[Tensor], dout: Tensor, causal: bool
) -> Callable[[], Any]:
    leaves = [x.detach().requires_grad_() for x in tensors]
    with torch.enable_grad():
        out = attend(*leaves, causal=causal)
    return partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)


def check(D: int, causal: bool) -> dict[str, float]:
    """The largest share of what the error rule allows, at two sizes of scores."""
    worst: dict[str, float] = {}
    for sigma in (1.0, 30.0):
        *qkv, dout = torch.randn(4, 1, 2, 1000, D)
        qkv[0] *= sigma
        given = Tensors(*qkv)
        rules = error_rule.expect(describe(given, Options(causal)), given, dout)
        attend = CONTENDERS["float32"]
        found = [attend(*qkv, causal=causal), *gradient(attend, qkv, dout, causal)()]
        for name, x in zip(("out", "dq", "dk", "dv"), found, strict=True):
            worst[name] = max(worst.get(name, 0.0), rules[name].share(x))
    if max(worst.values()) > 1:
        raise ValueError(f"D {D}, causal {causal}: beyond the error rule: {worst}")
    return worst


def with_flag(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """A call with torch's tf32 flag as its contender wants it, in the backward too."""
    if name not in FLAGS:
        return call

    def run() -> Any:
        torch.backends.cuda.matmul.allow_tf32 = FLAGS[name]
        return call()

    return run


def measure(D: int, S: int, causal: bool) -> list[dict[str, Any]]:
    B, H = TOKENS // S, COLUMNS // D
    *qkv, dout = torch.randn(4, B, H, S, D)
    rows = []
    for backward in (False, True):
        calls = {
            name: with_flag(
                name,
                gradient(attend, qkv, dout, causal)
                if backward
                else partial(attend, *qkv, causal=causal),
            )
            for name, attend in CONTENDERS.items()
        }
        for call in calls.values():
            call()
        timings = take_turns(calls, ROUNDS)
        flops = 4 * B * H * S * S * D / (2 if causal else 1) * (2.5 if backward else 1)
        for name in calls:
            tflops = round(flops / timings.median(name) / 1e12, 1)
            common = {"D": D, "S": S, "causal": causal, "backward": backward}
            rows.append({**common, "kernel": name, "tflops": tflops})
        print(common, {row["kernel"]: row["tflops"] for row in rows[-len(calls) :]}, flush=True)
    return rows


def main() -> None:
    torch.set_default_device("cuda")
    shares = {f"D {D}, causal {causal}": check(D, causal) for D, _, causal in CASES}
    print(shares, flush=True)
    if "--check" in sys.argv:
        return
    run = results.collect("float32", [row for case in CASES for row in measure(*case)])
    run["error_shares"] = shares
    run["note"] = (
        f"B·S = {TOKENS:,} tokens, heads of {COLUMNS:,} columns in all. SDPA is PyTorch's "
        "memory-efficient kernel."
    )
    run["tables"] = {
        table: {
            "columns": {
                f"{name}{', backward' if backward else ''}": {"kernel": name, "backward": backward}
                for backward in (False, True)
                for name in names
            },
            "caption": f"TFLOP/s, {tensors}",
        }
        for table, (names, tensors) in TABLES.items()
    }
    results.save_for_gpu(run, "float32", ROOT / results.RESULTS)


if __name__ == "__main__":
    main()
