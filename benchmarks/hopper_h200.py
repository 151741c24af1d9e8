"""Builds of the Hopper forward against each other and against cuDNN and FA3, in one run.

    python benchmarks/hopper_h200.py [--peers DIRECTORY] [--save-to DIRECTORY] [--rounds N]

The directory of peers holds `peers.py` with `load_fa3(file)` and `fa3(...)`, and the file `fa3.xz`.
Every build is first checked against float64; one that is wrong is reported and not timed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from lockstep import reference
from lockstep.bench import results
from lockstep.kernels.hopper import launch
from lockstep.kernels.hopper.plan import PLANS, Plan
from lockstep.problem import Options, Tensors, describe

TOKENS = 16384
HEADS = {64: 32, 128: 16, 256: 8}
BUILDS = {
    64: (
        PLANS[64],
        Plan(consumers=3, block_kv=128, stages=2, turns=False),
        Plan(consumers=2, block_kv=128, stages=3, turns=True),
    ),
    128: (PLANS[128], Plan(consumers=2, block_kv=128, stages=2, turns=True)),
    256: (PLANS[256], Plan(consumers=2, block_kv=64, stages=2, turns=True)),
}
Call = Callable[[], object]


def name_of(plan: Plan) -> str:
    turns = ", turns" if plan.turns else ""
    return f"{plan.consumers} consumers, {plan.stages} stages{turns}"


def prepare(plan: Plan, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Callable[[], Tensor]:
    """A call of the kernel built as `plan` says."""
    tensors = Tensors(q, k, v)
    problem = describe(tensors, Options(causal=causal))

    def call() -> Tensor:
        chosen = launch.plan_of
        launch.plan_of = lambda problem: plan
        try:
            return launch.forward(problem, tensors)[0]
        finally:
            launch.plan_of = chosen

    return call


def is_right(plan: Plan, D: int, causal: bool) -> bool:
    """Against float64 on a shape with ragged edges, many times over."""
    q, k, v = (torch.randn(1, 2, 1023, D, device="cuda").bfloat16() for _ in range(3))
    call = prepare(plan, q, k, v, causal)
    exact = reference.attention(q.cpu(), k.cpu(), v.cpu(), causal=causal).cuda()
    first = call()
    close = torch.allclose(first.double(), exact.double(), atol=0.02)
    return close and all(torch.equal(call(), first) for _ in range(100))


def peers_of(directory: Path | None, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict:
    def cudnn() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

    found: dict[str, Call] = {"cuDNN": cudnn}
    if directory is not None:
        bundles = import_module("peers")
        tokens = (x.transpose(1, 2).contiguous() for x in (q, k, v))
        found["FA3"] = bundles.fa3(*tokens, causal)
    return found


def times(calls: dict[str, Call], rounds: int) -> dict[str, float]:
    """Median milliseconds; contenders take turns, L2 is flushed before each call."""
    flush = torch.empty(1 << 26, dtype=torch.int32, device="cuda")
    events: dict[str, list] = {name: [] for name in calls}
    for call in calls.values():
        call()
    for _ in range(rounds):
        for name, call in calls.items():
            for _ in range(8):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                flush.zero_()
                begin.record()
                call()
                end.record()
                events[name].append((begin, end))
    torch.cuda.synchronize()
    return {name: median(b.elapsed_time(e) for b, e in pairs) for name, pairs in events.items()}


def rows(directory: Path | None, rounds: int, console: Console) -> Iterator[dict]:
    for D, H in HEADS.items():
        for S in (1024, 4096, 16384):
            for causal in (False, True):
                B = TOKENS // S
                q, k, v = (torch.randn(B, H, S, D, device="cuda").bfloat16() for _ in range(3))
                calls = peers_of(directory, q, k, v, causal)
                for plan in BUILDS[D]:
                    if is_right(plan, D, causal):
                        calls[name_of(plan)] = prepare(plan, q, k, v, causal)
                    else:
                        console.print(f"D {D}, {name_of(plan)}: wrong")
                flops = 4 * B * H * S * S * D / (2 if causal else 1)
                for kernel, ms in times(calls, rounds).items():
                    shape = {"B": B, "H": H, "S": S, "D": D, "causal": causal}
                    tflops = flops / ms / 1e9
                    console.print(f"{shape} {kernel}: {tflops:.0f} TFLOP/s")
                    yield {**shape, "dtype": "bfloat16", "kernel": kernel, "tflops": tflops}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=Path, help="where peers.py and fa3.xz are")
    parser.add_argument("--save-to", type=Path, help="write the results here")
    parser.add_argument("--rounds", type=int, default=4)
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("needs a Hopper GPU", file=sys.stderr)
        return 2
    if arguments.peers is not None:
        sys.path.insert(0, str(arguments.peers))
        import_module("peers").load_fa3(str(arguments.peers / "fa3.xz"))
    run = results.collect(
        "hopper-forward", list(rows(arguments.peers, arguments.rounds, Console()))
    )
    if arguments.save_to is not None:
        print(results.save(run, arguments.save_to))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
