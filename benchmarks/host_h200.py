"""The time of the host for a call, beside FA3 and PyTorch: docs/triton.md.

    PYTHONPATH=src python benchmarks/host_h200.py PEERS_DIRECTORY [--save-to benchmarks/results]

PEERS_DIRECTORY is that of `gpu_h200.py`. From a call to its return, warm: the results are allocated
and the kernels are in the stream, the device is not waited for. Contenders take turns of
`HOST_CALLS` calls that begin with an idle device. Small batches and large ones stand side by side:
nothing that the host does grows with the batch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_h200 import _fa3_decode, _fa3_prefill, _fa3_varlen, unpack
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import lockstep
from lockstep.bench.gpu_timing import HOST_CALLS, take_host_turns
from lockstep.output import results

ROUNDS, WARM_ROUNDS = 12, 3
HQ, HKV, D, PAGE = 8, 2, 64, 256
OURS, FA3, SDPA = "Lockstep", "FA3", "`scaled_dot_product_attention`"
Calls = dict[str, Callable[[], Any]]


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=torch.bfloat16, device="cuda")


def integers(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def prefill(B: int, S: int) -> Calls:
    q, k, v = (normal(B, HQ, S, D) for _ in range(3))
    return {
        OURS: lambda: lockstep.attention(q, k, v, causal=True),
        FA3: _fa3_prefill(q, k, v, True),
        SDPA: lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
    }


def with_gradient(B: int, S: int) -> Calls:
    """The forward alone, with a gradient to come; the FA3 at hand has none."""
    q, k, v = (normal(B, HQ, S, D).requires_grad_() for _ in range(3))
    return {
        OURS: lambda: lockstep.attention(q, k, v, causal=True),
        SDPA: lambda: scaled_dot_product_attention(q, k, v, is_causal=True),
    }


def packed(B: int, S: int) -> Calls:
    q, k, v = (normal(B * S, HQ, D) for _ in range(3))
    offsets = integers(*range(0, B * S + 1, S))
    return {
        OURS: lambda: lockstep.attention_varlen(q, k, v, offsets, offsets, causal=True),
        FA3: _fa3_varlen(q, k, v, offsets, S, True),
    }


def paged_decode(B: int, S: int) -> Calls:
    n_pages = B * S // PAGE
    q, k, v = normal(B, HQ, 1, D), normal(n_pages, PAGE, HKV, D), normal(n_pages, PAGE, HKV, D)
    table = torch.randperm(n_pages, device="cuda").int().view(B, -1)
    lens = integers(*[S] * B)
    return {
        OURS: lambda: lockstep.attention_paged(q, k, v, table, lens, causal=True),
        FA3: _fa3_decode(0)(q, k, v, table, lens),
    }


def dense_decode(B: int, S: int) -> Calls:
    q, k, v = normal(B, HQ, 1, D), normal(B, HKV, S, D), normal(B, HKV, S, D)
    return {
        OURS: lambda: lockstep.attention(q, k, v, causal=True),
        SDPA: lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
    }


CASES: list[tuple[str, Callable[[int, int], Calls], int, int]] = [
    ("prefill", prefill, 1, 64),
    ("prefill", prefill, 256, 64),
    ("packed", packed, 2, 64),
    ("packed", packed, 256, 64),
    ("decode, pages of 256", paged_decode, 1, 2048),
    ("decode, pages of 256", paged_decode, 256, 2048),
    ("decode, one tensor", dense_decode, 1, 16384),
    ("decode, one tensor", dense_decode, 64, 16384),
    ("prefill, with a gradient to come", with_gradient, 1, 64),
]


def measure(
    call: str, make: Callable[[int, int], Calls], B: int, S: int, rounds: int = ROUNDS
) -> list[dict[str, Any]]:
    calls = make(B, S)
    for contender in calls.values():
        # The first may compile, and the second prepares the others.
        for _ in range(3):
            contender()
    timings = take_host_turns(calls, rounds)
    rows = [
        {
            "call": call,
            "B": B,
            "keys": S,
            "contender": name,
            "microseconds": round(1e6 * timings.median(name), 2),
            "microseconds_least": round(1e6 * min(timings.seconds[name]), 2),
        }
        for name in calls
    ]
    print(call, B, S, {row["contender"]: row["microseconds"] for row in rows}, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--save-to", type=Path)
    options = parser.parse_args()
    unpack(options.peers)
    torch.manual_seed(0)
    # The first turns of a process are slower than all that follow: these do not count.
    for case in CASES:
        measure(*case, rounds=WARM_ROUNDS)
    run = results.collect("host", [row for case in CASES for row in measure(*case)])
    run["method"] = (
        f"Turns of {HOST_CALLS} calls that begin with an idle device; the median and the least of "
        f"{ROUNDS} turns. FA3 is that of vLLM 0.20.2, called as an operator; it chooses how far to "
        "split."
    )
    run["tables"] = {
        "host": {
            "by": ["call", "B", "keys"],
            "columns": {name: {"contender": name} for name in (OURS, FA3, SDPA)},
            "value": "microseconds",
            "format": "{:.1f}",
            "bold": "min",
            "caption": f"µs of the host for a call, bf16, Hq {HQ}, D {D}, causal",
        }
    }
    if options.save_to:
        print(results.save_for_gpu(run, "host", options.save_to))


if __name__ == "__main__":
    main()
