"""`lockstep bench gpu` with FA3 and FA4 from bundles, where they are not installed as packages.

    python benchmarks/gpu_h200.py PEERS_DIRECTORY [--table decode ...] [--quick] [--save-to DIR]

PEERS_DIRECTORY holds `peers.py` with `load_fa3(file)`, `fa3(...)` and `load_fa4(a, b)`, the file
`fa3.xz`, and, if FA4 is to take part, the directories `a` and `b`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from lockstep.bench import gpu, gpu_run
from lockstep.bench.peers import Decode, Peer


def _fa3_decode(peers: Any, num_splits: int) -> Decode:
    """`num_splits` 0 lets FA3 choose."""

    def prepare(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Callable[[], Tensor]:
        tokens = q.transpose(1, 2).contiguous()  # [B, 1, Hq, D]
        call = peers.fa3(tokens, k_pages, v_pages, True, num_splits, kv_lens, page_table)
        return lambda: call().transpose(1, 2)

    return prepare


def load(directory: Path) -> list[Peer]:
    """FA3 and, where its parts are there, FA4."""
    sys.path.insert(0, str(directory))
    import peers

    peers.load_fa3(str(directory / "fa3.xz"))
    found = [
        Peer("FA3", peers.available()["fa3"], decode=_fa3_decode(peers, 0)),
        Peer("FA3 one split", decode=_fa3_decode(peers, 1)),
    ]
    if (directory / "a").is_dir():
        peers.load_fa4(str(directory / "a"), str(directory / "b"))
        found.append(Peer("FA4", peers.available()["fa4"], backward=True))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("--table", action="append", default=[], choices=list(gpu.UNITS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--save-to", type=Path)
    options = parser.parse_args()
    return gpu_run.main(
        options.table,
        quick=options.quick,
        more_peers=load(options.peers),
        directory=options.save_to,
    )


if __name__ == "__main__":
    raise SystemExit(main())
