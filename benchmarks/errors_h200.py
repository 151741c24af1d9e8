"""How far results are from float64, beside FlashAttention 2: rms, and the largest of many draws.

    python benchmarks/errors_h200.py --save-to benchmarks/results

The largest error of one draw is an extreme value, and differs from draw to draw, for one kernel as
well. So each case has DRAWS draws, and the kernels are compared draw by draw: `largest` is the
geometric mean over draws of the largest error over FlashAttention 2's, `its_error` the standard
error of that (as a factor, less 1), and `spread` the geometric standard deviation of FlashAttention
2's own largest error from draw to draw. FlashAttention 2 is that of PyTorch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lockstep
from lockstep import reference, results

DRAWS, HEADS, S = 24, 4, 1023
SIGMAS = (1.0, 3.0, 10.0, 30.0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Options of lockstep.attention, by the name of a contender.
CONTENDERS: dict[str, dict[str, Any]] = {
    "hopper": {"kernel": "hopper"},
    "triton": {"kernel": "triton"},
    "hopper, query-invariant": {"kernel": "hopper", "query_invariant": True},
    "hopper, constant time": {"kernel": "hopper", "constant_time": True},
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def draw(D: int, dtype: torch.dtype, sigma: float) -> list[Tensor]:
    """q and k times sigma, v, dout: [DRAWS, HEADS, S, D]"""
    torch.manual_seed(int(sigma) * 1000 + D)
    q, k, v, dout = torch.randn(4, DRAWS, HEADS, S, D, device="cuda")
    return [x.to(dtype) for x in (q * sigma, k * sigma, v, dout)]


def compute(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> dict[str, Tensor]:
    """out and gradients in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    names = ("out", "dq", "dk", "dv")
    return {name: x.detach().double() for name, x in zip(names, (out, *grads), strict=True)}


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def contenders(q: Tensor, k: Tensor, v: Tensor, wanted: list[str]) -> Iterator[tuple[str, Attend]]:
    """Those that take such a call and its gradients."""
    for name in wanted:
        attend = partial(lockstep.attention, **CONTENDERS[name])
        try:
            leaves = [x[:1].detach().clone().requires_grad_() for x in (q, k, v)]
            attend(*leaves).sum().backward()
        except (NotImplementedError, ValueError) as error:
            print(f"{name}: {error}", flush=True)
            continue
        yield name, attend


def against(ours: Tensor, theirs: Tensor, exact: Tensor) -> dict[str, float]:
    """What the top of this file says, of errors of ours over errors of theirs."""
    mine, other = ((x - exact).abs() for x in (ours, theirs))
    largest, largest_other = (x.amax((1, 2, 3)).log() for x in (mine, other))  # [DRAWS]
    ratio = largest - largest_other
    return {
        "rms": float(mine.square().mean().sqrt() / other.square().mean().sqrt()),
        "largest": float(ratio.mean().exp()),
        "its_error": float((ratio.std() / DRAWS**0.5).exp() - 1),
        "largest_of_one_draw": float(ratio.max().exp()),
        "of_all_draws": float(mine.max() / other.max()),
        "spread": float(largest_other.std().exp()),
    }


def measure(D: int, dtype: str, sigma: float, wanted: list[str]) -> Iterator[dict[str, Any]]:
    tensors = draw(D, DTYPES[dtype], sigma)
    exact = compute(reference.attention, *(x.double() for x in tensors))
    theirs = compute(flash_attention_2, *tensors)
    for kernel, attend in contenders(*tensors[:3], wanted):
        ours = compute(attend, *tensors)
        for what, right in exact.items():
            figures = against(ours[what], theirs[what], right)
            case = {"kernel": kernel, "D": D, "dtype": dtype, "sigma": sigma, "what": what}
            yield {**case, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--save-to", type=Path, help="a directory for the results")
    parser.add_argument("--head-dims", default="64,96,128,192,256")
    parser.add_argument("--dtypes", default="bf16,fp16")
    parser.add_argument("--kernels", default=";".join(CONTENDERS), help="separated by ;")
    args = parser.parse_args()
    rows = []
    head_dims = [int(D) for D in args.head_dims.split(",")]
    for D, dtype, sigma in product(head_dims, args.dtypes.split(","), SIGMAS):
        for row in measure(D, dtype, sigma, args.kernels.split(";")):
            rows.append(row)
            print(row, flush=True)
    if args.save_to:
        run = results.collect("errors", rows)
        print(results.save_for_gpu(run, "errors", args.save_to))


if __name__ == "__main__":
    main()
