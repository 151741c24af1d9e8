"""`lockstep bench gpu` with FA3 and FA4 from bundles, where they are not installed as packages.

    python benchmarks/gpu_h200.py PEERS_DIRECTORY --processes 12 --save-to benchmarks/results

PEERS_DIRECTORY holds `peers.py` with `load_fa3(file)` and `load_fa4(a, b)`, the file `fa3.xz`, and,
if FA4 is to take part, the directories `a` and `b`.

Most of a first run is compilation, and all compilers here keep what they have made on disk. So
several processes first call everything once, then the run itself begins. flex_attention is compiled
for every shape, and takes part at 4k and 16k only.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from lockstep.bench import gpu_cases, gpu_run, peers
from lockstep.bench.contender import Call, Contender, Decode, Prefill
from lockstep.bench.gpu_calls import TABLES

# What is not compiled by then is left to the run itself.
WARM_UP_SECONDS = 65.0
FLEX_LENGTHS = (4096, 16384)
# Larger caches would not fit into memory for all processes at once, and need no other builds.
MOST_TOKENS = 1 << 19
STARTED = perf_counter()


def keep_builds() -> None:
    """Have all compilers keep what they make, and where the next process looks for it."""
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    # Once it has compiled something, Inductor would have Triton look elsewhere.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    # One pool of compilers per process would be too many.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def unpack(directory: Path) -> bool:
    """Load FA3 and, where its parts are there, FA4 out of their bundles; whether FA4 is."""
    sys.path.insert(0, str(directory))
    bundles = import_module("peers")
    has_fa4 = (directory / "a").is_dir()
    # What one process unpacks, others find: they must not find half of it.
    with (Path(tempfile.gettempdir()) / "lockstep_peers.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        bundles.load_fa3(str(directory / "fa3.xz"))
        if has_fa4:
            bundles.load_fa4(str(directory / "a"), str(directory / "b"))
    return has_fa4


def load(directory: Path) -> list[Contender]:
    """FA3 and, where its parts are there, FA4."""
    has_fa4 = unpack(directory)
    found = [
        Contender(
            "FA3",
            _fa3_prefill,
            decode=_fa3_decode(0),
            varlen=_fa3_varlen,
            tokens_first=True,
            version="of vLLM 0.20.2",
        ),
        Contender("FA3 one split", decode=_fa3_decode(1)),
    ]
    if has_fa4:
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


def _flex_at_some_lengths() -> Iterable[Contender]:
    for peer in peers.find():
        if peer.name == "flex" and peer.prefill is not None:
            yield replace(peer, prefill=partial(_at_some_lengths, peer.prefill))


def _at_some_lengths(prefill: Prefill, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    if q.shape[2] not in FLEX_LENGTHS or q.shape[3] > 128:
        raise NotImplementedError("left out of this run, to save the time of compiling it")
    return prefill(q, k, v, causal)


def load_all(options: argparse.Namespace) -> list[Contender]:
    """The peers, after everything has been called once by `options.processes` processes."""
    flex = list(_flex_at_some_lengths())
    if not options.processes:
        return [*flex, *load(options.peers)]
    claims = tempfile.mkdtemp()

    def start(which: str) -> list[subprocess.Popen[bytes]]:
        command = [sys.executable, *sys.argv, "--warm-up", which, claims]
        return [subprocess.Popen(command) for _ in range(options.processes)]

    workers = start("others")
    loaded = [*flex, *load(options.peers)]
    if any(contender.name == "FA4" for contender in loaded):
        # They could not begin before it was unpacked.
        workers += start("FA4")
    # This process has to import and to load all that, too.
    under_way = _until(lambda: any(worker.poll() is None for worker in workers))
    contenders = gpu_run.contenders(loaded, options.without)
    calls = _calls(options, contenders, ("hopper", "flex", "FA4"))
    _call_once(call for call in calls if under_way())
    for worker in workers:
        try:
            worker.wait(max(0.0, STARTED + WARM_UP_SECONDS - perf_counter()))
        except subprocess.TimeoutExpired:
            worker.kill()
    print(f"compiled after {perf_counter() - STARTED:.0f} s", file=sys.stderr, flush=True)
    return loaded


def _until(condition: Callable[[], bool]) -> Callable[[], bool]:
    """Whether it holds and there is time left to warm up."""
    return lambda: condition() and perf_counter() < STARTED + WARM_UP_SECONDS


def warm_up(which: str, claims: Path, options: argparse.Namespace) -> None:
    """In one of several processes: call what no other one has claimed."""
    more = load(options.peers) if which == "FA4" else list(_flex_at_some_lengths())
    contenders = gpu_run.contenders(more, options.without)
    mine = [contender for contender in contenders if (contender.name == "FA4") == (which == "FA4")]
    numbered = enumerate(_calls(options, mine, ("hopper", "flex")))
    _call_once(call for number, call in numbered if claim(claims / f"{which}_{number}"))


def claim(path: Path) -> bool:
    """Whether this process is the first to claim it."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _calls(
    options: argparse.Namespace, contenders: Iterable[Contender], before_others: tuple[str, ...]
) -> list[tuple[gpu_cases.Case, Contender]]:
    """What compiles something. Most compile for head dims and masks, not for lengths: one length of
    each before the others."""
    named = {contender.name: contender for contender in contenders}
    compiled = [named.pop(name) for name in before_others if name in named]
    compiled += [e for e in named.values() if e.kind == "ours" or e.name == "FA4"]
    cases = [c for c in gpu_run.choose(options.table, options.case) if c.tokens <= MOST_TOKENS]
    first: dict[tuple[str, int, bool], gpu_cases.Case] = {}
    for case in cases:
        first.setdefault((case.table, case.D, case.causal), case)
    rest = [case for case in cases if case not in first.values()]
    parts = (first.values(), rest)
    calls = [(case, contender) for part in parts for contender in compiled for case in part]
    return [(case, contender) for case, contender in calls if _takes_part(contender, case)]


def _takes_part(contender: Contender, case: gpu_cases.Case) -> bool:
    of_table = {
        "decode": contender.decode,
        "host_decode": contender.decode,
        "varlen": contender.varlen,
    }
    if case.table in of_table:
        return of_table[case.table] is not None
    return contender.prefill is not None and (case.table != "backward" or contender.backward)


def _call_once(calls: Iterable[tuple[gpu_cases.Case, Contender]]) -> None:
    for case, contender in calls:
        try:
            call = TABLES[case.table](case).prepare(contender)
            with torch.no_grad():
                if call is not None:
                    call()
            torch.cuda.synchronize()
        except NotImplementedError:
            pass
        except Exception as error:
            # The run will show the same in its cell.
            print(f"{contender.name}, {case}: {error}"[:200], file=sys.stderr)
        torch.cuda.empty_cache()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("peers", type=Path, metavar="PEERS_DIRECTORY")
    parser.add_argument("--processes", type=int, default=0, help="that compile before the run")
    parser.add_argument("--table", action="append", default=[], choices=list(gpu_cases.UNITS))
    parser.add_argument("--case", action="append", default=[], help="part of a case's name")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--without", action="append", default=[], help="name of a contender")
    parser.add_argument("--save-to", type=Path, help="directory for the results file")
    parser.add_argument(
        "--budget-seconds", type=float, help="begin no case after this time; what is left is named"
    )
    parser.add_argument("--warm-up", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    keep_builds()
    if options.warm_up:
        which, claims = options.warm_up
        warm_up(which, Path(claims), options)
        return 0
    loaded = load_all(options)
    budget = options.budget_seconds
    return gpu_run.main(
        options.table,
        quick=options.quick,
        more_peers=loaded,
        without=options.without,
        cases=options.case,
        deadline=None if budget is None else STARTED + budget,
        directory=options.save_to,
    )


if __name__ == "__main__":
    raise SystemExit(main())
