"""`lockstep bench gpu` with FA3 and FA4 from bundles, where they are not installed as packages.

    python benchmarks/gpu_h200.py PEERS_DIRECTORY [--table decode ...] [--without flex ...]
                                  [--quick] [--save-to DIR] [--warm-up I/N]

`--warm-up I/N` runs every N-th case from the I-th on and shows nothing: N processes at once compile
what the run after them then finds compiled.

PEERS_DIRECTORY holds `peers.py` with `load_fa3(file)`, `fa3(...)` and `load_fa4(a, b)`, the file
`fa3.xz`, and, if FA4 is to take part, the directories `a` and `b`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.bench import gpu, gpu_run, peers
from lockstep.bench.peers import Decode, Peer


def _fa3_decode(bundles: Any, num_splits: int) -> Decode:
    """`num_splits` 0 lets FA3 choose."""

    def prepare(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Callable[[], Tensor]:
        tokens = q.transpose(1, 2).contiguous()  # [B, 1, Hq, D]
        call = bundles.fa3(tokens, k_pages, v_pages, True, num_splits, kv_lens, page_table)
        return lambda: call().transpose(1, 2)

    return prepare


def load(directory: Path) -> list[Peer]:
    """FA3 and, where its parts are there, FA4."""
    sys.path.insert(0, str(directory))
    bundles = import_module("peers")
    bundles.load_fa3(str(directory / "fa3.xz"))
    found = [
        Peer("FA3", bundles.available()["fa3"], decode=_fa3_decode(bundles, 0)),
        Peer("FA3 one split", decode=_fa3_decode(bundles, 1)),
    ]
    if (directory / "a").is_dir():
        bundles.load_fa4(str(directory / "a"), str(directory / "b"))
        found.append(Peer("FA4", bundles.available()["fa4"], backward=True))
    return found


def warm_up(i: int, n: int, without: list[str]) -> None:
    theirs = [peer for peer in peers.find() if peer.name not in without]
    for case in gpu.CASES[i::n]:
        gpu.run(case, gpu.kernels(), theirs, quick=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--table", action="append", default=[], choices=list(gpu.UNITS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--without", action="append", default=[])
    parser.add_argument("--save-to", type=Path)
    parser.add_argument("--warm-up", metavar="I/N")
    options = parser.parse_args()
    if options.warm_up:
        warm_up(*map(int, options.warm_up.split("/")), options.without)
        return 0
    return gpu_run.main(
        options.table,
        quick=options.quick,
        more_peers=load(options.peers),
        without=options.without,
        directory=options.save_to,
    )


if __name__ == "__main__":
    raise SystemExit(main())
