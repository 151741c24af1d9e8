"""How far results are from float64, beside FlashAttention 2: rms, and the largest of many draws.

    python benchmarks/errors_h200.py --save-to benchmarks/results

The largest error of one draw is an extreme value, and differs from draw to draw, for one kernel as
well. So each case has DRAWS draws of 4,092 rows, or of 1,024 with few queries, and kernels are
compared draw by draw: `largest` is the geometric mean over draws of the largest error over that of
FlashAttention 2, `its_error` the standard error of this mean (as a factor, less 1), and `spread`
the geometric standard deviation of FlashAttention 2's own largest error. FlashAttention 2 is
PyTorch's.

Rows with a window on the left are compared with those of the Triton kernel, which has a running
maximum as FlashAttention 2 has it: PyTorch's takes no window.

With several processes at a time (`--head-dims 64 --dtypes bf16` and so on), each writes its rows to
a file, and `--join FILE...` makes the results of them.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import lockstep
from lockstep import reference
from lockstep.output import results

DRAWS = 24
HEADS = {1023: 4, 4095: 1}  # by how many queries and keys there are
FEW_QUERIES, FEW_HEADS, KEYS, PAGE = 16, 64, 1023, 64
# Keys that a row sees, queries and keys, heads: every kind of Hopper build for windows.
WINDOWS = ((130, 1023, 4), (300, 1023, 4), (1001, 2047, 2), (2101, 4095, 1), (3500, 5000, 1))
SIGMAS = (1.0, 3.0, 10.0, 30.0)
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Options of lockstep.attention, by the name of a contender.
CONTENDERS: dict[str, dict[str, Any]] = {
    "hopper": {"kernel": "hopper"},
    "triton": {"kernel": "triton"},
    "hopper, query-invariant": {"kernel": "hopper", "query_invariant": True},
    "hopper, constant time": {"kernel": "hopper", "constant_time": True},
}
# And of lockstep.attention_paged.
FEW_CONTENDERS: dict[str, dict[str, Any]] = {
    "hopper_decode": {"kernel": "hopper_decode"},
    "triton": {"kernel": "triton"},
    "pages, query-invariant": {"query_invariant": True},
}
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Row = dict[str, Any]
Results = dict[str, Tensor]
Run = Callable[..., Results]


def draw(shape_q: tuple[int, ...], keys: int, dtype: torch.dtype, sigma: float) -> list[Tensor]:
    """q and k times sigma, v, dout; all have the dims of q, but for the number of keys."""
    torch.manual_seed(int(sigma) * 1000 + shape_q[-1])
    shape_k = (*shape_q[:2], keys, shape_q[-1])
    q, k, v, dout = (torch.randn(x, device="cuda") for x in (shape_q, shape_k, shape_k, shape_q))
    return [x.to(dtype) for x in (q * sigma, k * sigma, v, dout)]


def compute(attend: Attend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """out and gradients in float64."""
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    grads = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    names = ("out", "dq", "dk", "dv")
    return {name: x.detach().double() for name, x in zip(names, (out, *grads), strict=True)}


def compute_out(attend: Attend, q: Tensor, k: Tensor, v: Tensor, _dout: Tensor) -> Results:
    return {"out": attend(q, k, v).double()}


def flash_attention_2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return F.scaled_dot_product_attention(q, k, v)


def in_pages(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """lockstep.attention_paged of keys in one tensor."""
    B, H, n, D = k.shape
    padded = [F.pad(x, (0, 0, 0, -n % PAGE)) for x in (k, v)]
    pages = [
        x.view(B, H, -1, PAGE, D).permute(0, 2, 3, 1, 4).reshape(-1, PAGE, H, D) for x in padded
    ]
    table = torch.arange(len(pages[0]), device="cuda", dtype=torch.int32).view(B, -1)
    lens = torch.full((B,), n, device="cuda", dtype=torch.int32)
    return lockstep.attention_paged(q, *pages, table, lens, **options)


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


def first_that_runs(ways: tuple[Run, ...], attend: Attend, tensors: list[Tensor]) -> Results:
    """What the first of `ways` returns that kernels of this contender take; else nothing."""
    for way in ways:
        try:
            return way(attend, *tensors)
        except NotImplementedError as error:
            print(error, flush=True)
    return {}


def run_in_parts(run: Run, tensors: list[Tensor], **options: Any) -> Results:
    """The float64 oracle, two draws at a time: several processes share the memory of the GPU."""
    oracle = partial(reference.attention, **options)
    double = (x.double().split(2) for x in tensors)
    parts = [run(oracle, *x) for x in zip(*double, strict=True)]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def compare(tensors: list[Tensor], contenders: dict[str, Attend], run: Run) -> Iterator[Row]:
    exact = run_in_parts(run, tensors)
    theirs = run(flash_attention_2, *tensors)
    for kernel, attend in contenders.items():
        ours = first_that_runs((run, compute_out), attend, tensors)
        for name, mine in ours.items():
            yield {"kernel": kernel, "result": name, **against(mine, theirs[name], exact[name])}


def measure(D: int, dtype: str, sigma: float) -> Iterator[Row]:
    case = {"D": D, "dtype": dtype, "sigma": sigma}
    contenders = {name: partial(lockstep.attention, **x) for name, x in CONTENDERS.items()}
    for S, H in HEADS.items():
        tensors = draw((DRAWS, H, S, D), S, DTYPES[dtype], sigma)
        for row in compare(tensors, contenders, compute):
            yield {**case, "Sq": S, "Skv": S, **row}
    few = {name: partial(in_pages, **x) for name, x in FEW_CONTENDERS.items()}
    tensors = draw((DRAWS, FEW_HEADS, FEW_QUERIES, D), KEYS, DTYPES[dtype], sigma)
    for row in compare(tensors, few, compute_out):
        yield {**case, "Sq": FEW_QUERIES, "Skv": KEYS, **row}


def measure_windows(D: int, dtype: str, sigma: float) -> Iterator[Row]:
    """Rows that see as many keys as the window has."""
    for keys, S, H in WINDOWS:
        tensors = draw((DRAWS, H, S, D), S, DTYPES[dtype], sigma)
        options: dict[str, Any] = {"causal": True, "window": (keys - 1, 0)}
        ours, theirs = (
            compute_out(partial(lockstep.attention, kernel=name, **options), *tensors)
            for name in ("hopper", "triton")
        )
        exact = run_in_parts(compute_out, tensors, **options)
        whole = (x["out"][:, :, keys:] for x in (ours, theirs, exact))
        yield {"D": D, "dtype": dtype, "sigma": sigma, "window": keys, "Skv": S, **against(*whole)}


def summarize(rows: list[Row], names: tuple[str, ...]) -> list[Row]:
    """For all that has these names in common, the highest figures of all cases."""
    highest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        key = {name: row[name] for name in names}
        found = highest.setdefault(tuple(key.values()), {**key, "rms": 0.0, "largest": 0.0})
        found |= {name: max(found[name], row[name]) for name in ("rms", "largest")}
    return list(highest.values())


def tables() -> dict[str, Any]:
    columns = {name: {"kernel": name} for name in CONTENDERS | FEW_CONTENDERS}
    windows = {
        "of": "windows_summary",
        "by": ["D", "window"],
        "columns": {f"sigma {sigma:g}": {"sigma": sigma} for sigma in SIGMAS},
        "value": "largest",
        "format": "{:.2f}",
        "caption": "Largest error of out with a window, times that of the Triton kernel, which has "
        "a running maximum; the higher of bf16 and fp16, geometric means of 24 draws",
    }
    heading = "times that of FlashAttention 2, the highest of all head dims, dtypes and lengths"
    return {
        f"errors_{value}": {
            "of": "summary",
            "by": ["result", "sigma"],
            "columns": columns,
            "value": value,
            "format": "{:.2f}",
            "caption": f"{title}, {heading}",
        }
        for value, title in (("rms", "Rms error"), ("largest", "Largest error of a draw"))
    } | {"hopper_window_errors": windows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--save-to", type=Path, help="a directory for the results")
    parser.add_argument("--rows", type=Path, help="a file for the rows alone")
    parser.add_argument("--head-dims", default="64,96,128,192,256")
    parser.add_argument("--dtypes", default="bf16,fp16")
    parser.add_argument("--join", type=Path, nargs="+", default=[], help="files of rows")
    args = parser.parse_args()
    rows: list[Row] = [row for path in args.join for row in json.loads(path.read_text())]
    head_dims = [] if args.join else [int(D) for D in args.head_dims.split(",")]
    for D, dtype, sigma in product(head_dims, args.dtypes.split(","), SIGMAS):
        for row in chain(measure(D, dtype, sigma), measure_windows(D, dtype, sigma)):
            rows.append(row)
            print(row, flush=True)
    if args.rows:
        args.rows.write_text(json.dumps(rows))
    if args.save_to:
        windows = [row for row in rows if "window" in row]
        plain = [row for row in rows if "window" not in row]
        run = results.collect("errors", plain)
        run |= {"tables": tables(), "summary": summarize(plain, ("kernel", "result", "sigma"))}
        run |= {"windows": windows, "windows_summary": summarize(windows, ("D", "window", "sigma"))}
        print(results.save_for_gpu(run, "errors", args.save_to))


if __name__ == "__main__":
    main()
