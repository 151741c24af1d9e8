"""Ragged queries in pages on a Hopper GPU: one kernel for all sequences, or long ones by another.

    python benchmarks/ragged_h200.py PEERS_DIRECTORY --save-to benchmarks/results

PEERS_DIRECTORY is that of `gpu_h200.py`. Writes hopper-ragged-<gpu>.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import torch
from gpu_h200 import keep_builds, unpack
from torch import Tensor

from lockstep.bench.gpu_timing import take_turns
from lockstep.bench.models import flash_peers
from lockstep.bench.models.drawn import DrawnCase
from lockstep.bench.models.inputs import Inputs, make
from lockstep.bench.models.measure import graphed
from lockstep.kernels.hopper.decode import launch
from lockstep.kernels.hopper.forward import ragged_pages
from lockstep.kernels.hopper.forward.scheduling import part_rule, tiling
from lockstep.kernels.launch import Launches
from lockstep.models import Layer
from lockstep.output import results
from lockstep.problem import describe

ROUNDS = 5
# What runs the sequences that are not long, and what runs those that are; both after a list.
LIST = ("list_tiles",)
SHORT, LONG = ("decode_kernel", "fold_slots"), ("forward_kernel",)
COLUMNS = (
    *("decode for all", "as it is", "keys in one part", "without its decode"),
    *("without its forward", "FA3"),
)


def _case(
    chunk: int, chunks: int, decodes: int, keys: int, Hq: int = 32, Hkv: int = 8
) -> DrawnCase:
    many = f"{chunks} × " * (chunks > 1)
    work = [f"{many}{chunk} queries"] * (chunks > 0) + [f"{decodes} single ones"] * (decodes > 0)
    shape = {"packed": True, "chunks": (chunk,) * chunks, "own": Layer(Hq, Hkv, 128, causal=True)}
    return DrawnCase("serve", "", "", " beside ".join(work), chunks + decodes, 1, keys, 16, **shape)


CASES = (
    _case(2048, 1, 0, 8192),
    _case(512, 1, 0, 8192),
    _case(4096, 1, 0, 4096),
    _case(500, 8, 0, 500),
    _case(128, 16, 0, 4096),
    _case(1024, 1, 63, 4096),
    _case(0, 0, 256, 1000),
    _case(2048, 1, 0, 32768, 8, 1),
    _case(512, 1, 0, 32768, 8, 1),
    _case(512, 8, 0, 16_000, 8, 1),
    _case(512, 1, 40, 8000, 8, 1),
    _case(256, 1, 0, 100_000, 8, 1),
    _case(64, 1, 0, 1500),
    _case(64, 1, 0, 60_000),
    _case(64, 32, 0, 1500),
    _case(200, 6, 0, 8000),
)


def contenders(inputs: Inputs) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """Calls by the name of their column, those of the whole checked against each other."""
    tensors = inputs.tensors
    problem = describe(tensors, inputs.case.shape.options)

    def ours(
        names: tuple[str, ...], split: bool = True, cuts: bool = True
    ) -> Callable[[], tuple[Tensor, ...]]:
        with ExitStack() as patches:
            if not split:
                patches.enter_context(
                    mock.patch.object(launch, "has_long_sequences", return_value=False)
                )
            if not cuts:
                for module in (part_rule, ragged_pages, tiling):
                    patches.enter_context(
                        mock.patch.object(module, "cuts_keys", return_value=False)
                    )
            call = launch.prepare(problem, tensors)
        assert isinstance(call, Launches)
        call.launches = tuple(x for x in call.launches if x.name in names)
        return lambda: call(tensors, tensors.addresses())

    everything = LIST + SHORT + LONG
    found = {
        COLUMNS[0]: ours(everything, split=False),
        COLUMNS[1]: ours(everything),
        COLUMNS[2]: ours(everything, cuts=False),
        COLUMNS[3]: ours(LIST + LONG),
        COLUMNS[4]: ours(LIST + SHORT),
    }
    peer = flash_peers.fa3()[0].prepare(inputs)
    found[COLUMNS[5]] = lambda: (peer(),)
    whole = [found[COLUMNS[i]]()[0] for i in (0, 1, 2, 5)]
    for out in whole[1:]:
        torch.testing.assert_close(out, whole[0], rtol=0.02, atol=0.02)
    return {name: graphed(call) for name, call in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--save-to", type=Path)
    given = parser.parse_args()
    keep_builds()
    unpack(given.peers)
    torch.manual_seed(0)
    rows = []
    for case in CASES:
        timings = take_turns(contenders(make(case)), ROUNDS)
        figures = {name: round(timings.median(name) * 1e6, 2) for name in COLUMNS}
        layer = case.shape
        call = f"{case.work} to {case.keys:,} keys, {layer.Hq}/{layer.Hkv} heads"
        rows += [{"call": call, "contender": name, "us": us} for name, us in figures.items()]
        print(call, figures, flush=True)
    if given.save_to is None:
        return
    run = results.collect("hopper-ragged", rows)
    run["tables"] = {
        "hopper_ragged": {
            "by": ["call"],
            "columns": {name: {"contender": name} for name in COLUMNS},
            "value": "us",
            "format": "{:.0f}",
            "caption": "µs, bf16, causal, D 128, pages of 16, in CUDA graphs, medians of "
            f"{ROUNDS} turns; `without` are the same calls less one of the two kernels",
        }
    }
    print(results.save_for_gpu(run, "hopper-ragged", given.save_to))


if __name__ == "__main__":
    main()
