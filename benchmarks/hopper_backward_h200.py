"""The Hopper backward against cuDNN and, where it is installed, FlashAttention-4, in one run.

    PYTHONPATH=src python benchmarks/hopper_backward_h200.py

Needs a GPU of compute capability 9.0. Checks each gradient against cuDNN's before it is timed, and
writes benchmarks/results/hopper-backward-peers-<gpu>.json.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from lockstep.bench import results
from lockstep.kernels.hopper.backward import backward
from lockstep.kernels.kernel import Needs
from lockstep.problem import Tensors, describe, make_options

ROOT = Path(__file__).resolve().parents[1]
TOKENS = 16384
HEADS = {64: 32, 128: 16}
LENGTHS = (1024, 4096, 16384)


def cudnn(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def flash_attention_4() -> Callable[[Tensor, Tensor, Tensor, bool], Tensor] | None:
    try:
        from flash_attn.cute import flash_attn_func
    except ImportError:
        return None

    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
        return (out[0] if isinstance(out, tuple) else out).transpose(1, 2)

    return run


def measure(D: int, S: int, causal: bool) -> dict[str, Any]:
    """TFLOP/s of each, the flops of five products counted, half of them if causal."""
    B, H = TOKENS // S, HEADS[D]
    q, k, v, dout = torch.randn(4, B, H, S, D, device="cuda", dtype=torch.bfloat16)
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    flops = 10 * B * H * S * S * D / (2 if causal else 1)

    def rate(call: Callable[[], Any]) -> float:
        return flops / float(do_bench(call, warmup=50, rep=200, return_mode="median")) / 1e9

    def peer(attention: Callable[[Tensor, Tensor, Tensor, bool], Tensor]) -> float:
        out = attention(*leaves, causal)
        return rate(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))

    out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]
    tensors, needs = Tensors(q, k, v), Needs(True, True, True, False, False)
    problem = describe(tensors, make_options(causal, None, None, None))

    def ours() -> Any:
        return backward(problem, tensors, out, lse, dout, None, needs)

    expected = torch.autograd.grad(cudnn(*leaves, causal), leaves, dout)
    for name, found, exact in zip("qkv", ours(), expected, strict=False):
        difference = float((found.float() - exact.float()).norm() / exact.float().norm())
        if not difference < 0.01:
            raise AssertionError(f"d{name} differs from cuDNN's by {difference:.3g}")
    rates = {"lockstep": rate(ours), "cuDNN": peer(cudnn)}
    newest = flash_attention_4()
    if newest is not None:
        rates["FA4"] = peer(newest)
    return {"D": D, "S": S, "causal": causal, "B": B, "H": H, "tflops": rates}


def main() -> None:
    console = Console()
    rows = []
    for D in HEADS:
        for S in LENGTHS:
            for causal in (False, True):
                row = measure(D, S, causal)
                rows.append(row)
                rates = "  ".join(f"{name} {rate:.0f}" for name, rate in row["tflops"].items())
                console.print(f"D {D}, S {S}{', causal' if causal else ''}: {rates} TFLOP/s")
    table = Table(title="backward, TFLOP/s", box=None)
    names = list(rows[0]["tflops"])
    for heading in ("D", "S", "causal", *names):
        table.add_column(heading, justify="right")
    for row in rows:
        rates = (f"{row['tflops'][name]:.0f}" for name in names)
        table.add_row(str(row["D"]), str(row["S"]), "yes" if row["causal"] else "no", *rates)
    console.print(table)
    run = results.collect("hopper-backward", rows)
    path = results.save_for_gpu(run, "hopper-backward-peers", ROOT / results.RESULTS)
    console.print(f"saved {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
