"""`lockstep bench gpu` with FA3 and FA4 from bundles, where they are not installed as packages.

    python benchmarks/gpu_h200.py PEERS_DIRECTORY --processes 12 --save-to benchmarks/results

PEERS_DIRECTORY holds `peers.py` with `load_fa3(file)` and `load_fa4(a, b)`, the file `fa3.xz`, and,
if FA4 is to take part, the directories `a` and `b`.

Most of a first run is compilation, and all compilers here keep what they have made on disk. So N
processes at once first call everything once, then the run itself begins.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

# Before anyone imports FA4 or Inductor, which would start a pool of compilers per process, and from
# its first compilation on have Triton keep what it makes elsewhere.
os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))

import torch
from torch import Tensor

from lockstep.bench import gpu, gpu_run, peers
from lockstep.bench.gpu_calls import TABLES
from lockstep.bench.peers import Call, Decode, Entrant

# What is not compiled by then is left to the run itself.
WARM_UP_SECONDS = 70.0


def load(directory: Path) -> list[Entrant]:
    """FA3 and, where its parts are there, FA4."""
    sys.path.insert(0, str(directory))
    bundles = import_module("peers")
    bundles.load_fa3(str(directory / "fa3.xz"))
    found = [
        Entrant(
            "FA3",
            _fa3_prefill,
            decode=_fa3_decode(0),
            varlen=_fa3_varlen,
            tokens_first=True,
            version="of vLLM 0.20.2",
        ),
        Entrant("FA3 one split", decode=_fa3_decode(1)),
    ]
    if (directory / "a").is_dir():
        bundles.load_fa4(str(directory / "a"), str(directory / "b"))
        found.append(peers.fa4())
    return found


def _fa3_prefill(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    B, H, S, D = q.shape
    cu_seqlens = torch.arange(0, (B + 1) * S, S, device="cuda", dtype=torch.int32)
    tokens = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]  # [B * S, H, D]
    call = _fa3_varlen(tokens[0], tokens[1], tokens[2], cu_seqlens, S, causal)
    return lambda: call().view(B, S, H, D).transpose(1, 2)


def _fa3_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool
) -> Call:
    return lambda: _fa3_forward(q, k, v, causal, longest, longest, cu_seqlens, cu_seqlens)


def _fa3_decode(num_splits: int) -> Decode:
    """`num_splits` 0 lets FA3 choose."""

    def prepare(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Call:
        B, Hq, _, D = q.shape
        one_each = torch.arange(B + 1, device="cuda", dtype=torch.int32)
        longest = page_table.shape[1] * k_pages.shape[1]
        tokens = q.view(B, Hq, D)
        paged = {"kv_lens": kv_lens, "page_table": page_table, "num_splits": num_splits}

        def run() -> Tensor:
            out = _fa3_forward(tokens, k_pages, v_pages, True, 1, longest, one_each, None, **paged)
            return out.view(B, Hq, 1, D)

        return run

    return prepare


def _fa3_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    longest_q: int,
    longest_k: int,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor | None,
    kv_lens: Tensor | None = None,
    page_table: Tensor | None = None,
    num_splits: int = 1,
) -> Tensor:
    """The operator's arguments by position; most of them are features not wanted here."""
    lengths: list[Any] = [cu_seqlens_q, cu_seqlens_k, None, None, kv_lens, longest_q, longest_k]
    # Scale, mask, window, softcap, and rotary embeddings interleaved or not.
    how = [q.shape[-1] ** -0.5, causal, -1, -1, 0.0, True]
    schedule = [None, num_splits, None, 0, None, 1, 0, None]
    arguments = [q, k, v, *[None] * 4, *lengths, page_table, *[None] * 8, *how, *schedule]
    return torch.ops._vllm_fa3_C.fwd(*arguments)[0]


def load_all(options: argparse.Namespace) -> list[Entrant]:
    """The peers, after `options.processes` processes have called everything once, and as many again
    FA4, which has to be unpacked first."""
    if not options.processes:
        return load(options.peers)
    started = perf_counter()

    def start(which: str) -> list[subprocess.Popen[bytes]]:
        n = options.processes
        command = [sys.executable, *sys.argv, "--warm-up", which]
        return [subprocess.Popen([*command, f"{i}/{n}"]) for i in range(n)]

    workers = start("others")
    loaded = load(options.peers)
    if any(entrant.name == "FA4" for entrant in loaded):
        workers += start("FA4")
    # Meanwhile, this process imports what it will need.
    everyone = gpu_run.entrants(loaded, options.without)
    case, *_ = gpu_run.choose(options.table, options.case)
    _call_once((case, entrant) for entrant in everyone)
    for worker in workers:
        try:
            worker.wait(max(0.0, started + WARM_UP_SECONDS - perf_counter()))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"compiled after {perf_counter() - started:.0f} s", file=sys.stderr, flush=True)
    return loaded


def warm_up(which: str, share: str, options: argparse.Namespace) -> None:
    """One process's share of the calls that compile something."""
    i, n = map(int, share.split("/"))
    more = load(options.peers) if which == "FA4" else []
    everyone = gpu_run.entrants(more, options.without)
    if which == "FA4":
        entrants = [entrant for entrant in everyone if entrant.name == "FA4"]
    else:
        entrants = [e for e in everyone if e.kind == "ours" or e.name == "flex"]
    # Most compile for head dims and masks, not for lengths: one length of each first.
    cases = gpu_run.choose(options.table, options.case)
    first = {(case.table, case.D, case.causal): case for case in cases}.values()
    rest = [case for case in cases if case not in first]
    calls = [(case, entrant) for part in (first, rest) for entrant in entrants for case in part]
    _call_once(calls[i::n])


def _call_once(calls: Iterable[tuple[gpu.Case, Entrant]]) -> None:
    for case, entrant in calls:
        try:
            call = TABLES[case.table](case).prepare(entrant)
            with torch.no_grad():
                call and call()
            torch.cuda.synchronize()
        except Exception as error:
            # The run will show the same in its cell.
            print(f"{entrant.name}, {case}: {error}"[:200], file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, metavar="PEERS_DIRECTORY")
    parser.add_argument("--processes", type=int, default=0, help="that compile before the run")
    parser.add_argument("--table", action="append", default=[], choices=list(gpu.UNITS))
    parser.add_argument("--case", action="append", default=[], help="part of a case's name")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--without", action="append", default=[], help="name of a contender")
    parser.add_argument("--save-to", type=Path, help="directory for the results file")
    parser.add_argument("--warm-up", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.warm_up:
        warm_up(*options.warm_up, options)
        return 0
    loaded = load_all(options)
    return gpu_run.main(
        options.table,
        quick=options.quick,
        more_peers=loaded,
        without=options.without,
        cases=options.case,
        directory=options.save_to,
    )


if __name__ == "__main__":
    raise SystemExit(main())
