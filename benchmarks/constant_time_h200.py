"""What constant time costs on an H200: each cell beside the ordinary build and FA3, in one run.

    for i in $(seq 0 11); do
        PYTHONPATH=src python benchmarks/constant_time_h200.py PEERS_DIRECTORY --warm-up $i/12 &
    done; wait
    PYTHONPATH=src python benchmarks/constant_time_h200.py PEERS_DIRECTORY

The first commands compile everything, a twelfth of the cells each, and compare outputs with those
of the ordinary build. FA3 comes from a bundle, as in `gpu_h200.py`. Writes
constant-time-cost-h200.json.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import lockstep
from lockstep.bench.gpu_timing import take_turns
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
TOKENS, ROUNDS = 16384, 4
ORDINARY, CONSTANT_TIME, SECRET_LENGTHS, FA3 = (
    "ordinary",
    "constant time",
    "constant time, secret lengths",
    "FA3",
)
# B, Hq, S, D, causal. A short call comes first: behind long ones, the GPU is slower.
SHORT = (4, 16, 1024, 64, True)
PREFILLS = [
    (TOKENS // S, 2048 // D, S, D, causal)
    for D, S, causal in product((64, 128), (4096, 16384), (False, True))
]
PREFILLS += [(1, 8, 16384, 256, True)]
# B, Skv, of one query.
DECODES = [(1, 4096), (8, 16384), (64, 4096)]
PAGE, HQ, HKV, D_DECODE = 256, 32, 8, 128
Calls = dict[str, Callable[[], Any]]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def forward(fa3: Any, B: int, H: int, S: int, D: int, causal: bool) -> Calls:
    q, k, v = (draw(B, H, S, D) for _ in range(3))
    call = partial(lockstep.attention, q, k, v, causal=causal)
    calls: Calls = {ORDINARY: call, CONSTANT_TIME: partial(call, constant_time=True)}
    if fa3:
        calls[FA3] = fa3(*(x.transpose(1, 2).contiguous() for x in (q, k, v)), causal)
    return calls


def backward(B: int, H: int, S: int, D: int, causal: bool) -> Calls:
    leaves = [draw(B, H, S, D).requires_grad_() for _ in range(3)]
    dout = draw(B, H, S, D)
    outs = {
        ORDINARY: lockstep.attention(*leaves, causal=causal),
        CONSTANT_TIME: lockstep.attention(*leaves, causal=causal, constant_time=True),
    }
    return {
        name: partial(torch.autograd.grad, out, leaves, dout, retain_graph=True)
        for name, out in outs.items()
    }


def decode(B: int, Skv: int) -> Calls:
    pages = B * Skv // PAGE
    k, v = (draw(pages, PAGE, HKV, D_DECODE) for _ in range(2))
    table = torch.randperm(pages, device="cuda", dtype=torch.int32).view(B, -1)
    lens = torch.full((B,), Skv, device="cuda", dtype=torch.int32)
    q = draw(B, HQ, 1, D_DECODE)
    call = partial(lockstep.attention_paged, q, k, v, page_table=table, kv_lens=lens)
    return {
        ORDINARY: call,
        CONSTANT_TIME: partial(call, constant_time=True),
        SECRET_LENGTHS: partial(call, constant_time=True, secret_lengths=True),
    }


def cells(fa3: Any) -> Iterator[tuple[dict[str, Any], Callable[[], Calls]]]:
    """What each row is about, and what makes its calls."""
    names = ("B", "H", "S", "D", "causal")
    for shape in (SHORT, *PREFILLS):
        yield (
            {"pass": "forward", **dict(zip(names, shape, strict=True))},
            partial(forward, fa3, *shape),
        )
    for shape in PREFILLS:
        yield (
            {"pass": "backward", **dict(zip(names, shape, strict=True))},
            partial(backward, *shape),
        )
    for B, Skv in DECODES:
        yield {"pass": "decode", "B": B, "S": Skv, "D": D_DECODE}, partial(decode, B, Skv)


def error(calls: Calls) -> float:
    """The largest difference from the ordinary build, by the largest number of its outputs."""
    base, mine = (calls[name]() for name in (ORDINARY, CONSTANT_TIME))
    if isinstance(base, Tensor):
        base, mine = (base,), (mine,)
    return max(
        float((x.float() - y.float()).abs().max() / x.float().abs().max())
        for x, y in zip(base, mine, strict=True)
    )


def part(text: str) -> tuple[int, int]:
    """ "0/12": the first of twelve parts."""
    first, _, parts = text.partition("/")
    if not int(first) < int(parts):
        raise ValueError(text)
    return int(first), int(parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peers", type=Path, metavar="PEERS_DIRECTORY")
    parser.add_argument(
        "--warm-up", metavar="I/N", type=part, help="compile the I-th of N parts, compare outputs"
    )
    parser.add_argument("--only", default="", help="forward, backward or decode")
    parser.add_argument("--out", type=Path, default=ROOT / results.RESULTS)
    options = parser.parse_args()
    fa3 = None
    if (options.peers / "fa3.xz").exists() and not options.warm_up:
        sys.path.insert(0, str(options.peers))
        bundles = import_module("peers")
        bundles.load_fa3(str(options.peers / "fa3.xz"))
        fa3 = bundles.fa3
    rows = []
    wanted = [(cell, make) for cell, make in cells(fa3) if options.only in cell["pass"]]
    if options.warm_up:
        first, parts = options.warm_up
        wanted = wanted[first::parts]
    for cell, make in wanted:
        torch.manual_seed(0)
        calls = make()
        if options.warm_up:
            print(cell, f"error {error(calls):.3g}", flush=True)
            for call in calls.values():
                call()
            continue
        for call in calls.values():
            call()
        timings = take_turns(calls, ROUNDS)
        seconds = {name: timings.median(name) for name in calls}
        ratios = {name: s / seconds[CONSTANT_TIME] for name, s in seconds.items()}
        rows.append({**cell, "seconds": seconds})
        print(cell, {k: f"{v * 1e6:.1f} us" for k, v in seconds.items()}, ratios, flush=True)
        del calls
    if rows:
        run = results.collect("constant-time-cost", rows)
        print(results.save_for_gpu(run, run["suite"], options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
