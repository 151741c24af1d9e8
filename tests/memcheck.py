"""A sample of calls under compute-sanitizer: kernels touch what they were given and nothing else.

    python tests/memcheck.py
    python tests/memcheck.py --match decode --kernel triton --tool initcheck

Each sample runs in a process of its own, through every GPU kernel that takes it, with its gradients
where it has some. Every tensor is an allocation by itself, so an access one element beyond it is
seen. Exit status 0 if there were none, 1 if there were some, 2 if nothing could run. Needs a GPU
and compute-sanitizer, which comes with the CUDA toolkit.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "kernels"))

import torch
from bad_metadata import spoil_lengths, spoil_pages, spoil_varlen
from problems import Case, draw, draw_douts, draw_varlen, paginate, run, supporting

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
FAILED, UNUSABLE = 1, 2
CLEAN, UNUSED, DIRTY = "clean", "unused", "FAILED"


def _strided() -> Case:
    """Rows at odd addresses, heads behind tokens, every other key."""
    # On the GPU at once: a copy would come out contiguous.
    q = torch.randn(1, 140, 2, 72, device="cuda").to(BF16).transpose(1, 2)[..., 3:67]
    k, v = torch.randn(2, 1, 2, 411, 64, device="cuda").to(BF16)[:, :, :, 1::2]
    return Case({"q": q, "k": k, "v": v}, {"causal": True})


def _decode(Skv: int, page_size: int = 0, **sizes: object) -> Case:
    lens = torch.tensor([Skv, 1, Skv - 37])
    case = draw(1, Skv, B=3, Hq=8, Hkv=2, kv_lens=lens, causal=True, **sizes)
    return paginate(case, page_size, garbage=float("nan")) if page_size else case


def _many_decodes(Skv: int, **sizes: object) -> Case:
    """So many heads that the program with the last part of one folds it."""
    lens = torch.arange(70) * (Skv - 1) // 69
    case = draw(1, Skv, B=70, Hq=8, Hkv=2, kv_lens=lens, causal=True, **sizes)
    return paginate(case, 16, garbage=float("nan"))


def _wrong_offsets(seed: int, D: int, Hq: int = 4) -> Case:
    lens = [263, 1, 0, 500] if Hq == 4 else [700, 63, 1300, 64]
    case = draw_varlen(lens, lens, Hq=Hq, D=D, dtype=BF16, causal=True)
    return spoil_varlen(random.Random(seed), case).case


def _wrong_lengths(seed: int, D: int) -> Case:
    case = draw(140, 300, B=4, D=D, dtype=BF16, kv_lens=torch.tensor([0, 1, 256, 300]), causal=True)
    return spoil_lengths(random.Random(seed), case).case


SAMPLES: dict[str, Callable[[], Case]] = {
    "prefill": lambda: draw(163, 311, B=2, Hq=6, Hkv=2, D=128, dtype=BF16, causal=True),
    "prefill, few queries": lambda: draw(17, 1500, D=64, dtype=F16, causal=True),
    "prefill, fp32": lambda: draw(163, 311, D=64, dtype=F32, causal=True),
    "prefill, D 256": lambda: draw(163, 311, D=256, dtype=BF16),
    "prefill, D 33, Dv 80, window": lambda: draw(
        140, 211, D=33, Dv=80, dtype=F16, window=(17, 5), softcap=8.0
    ),
    "prefill, D 1, Dv 17": lambda: draw(65, 130, D=1, Dv=17, dtype=BF16, causal=True),
    "prefill, D 128, Dv 17": lambda: draw(
        65, 300, B=2, Hq=4, D=128, Dv=17, dtype=BF16, causal=True
    ),
    "prefill, D 512, Dv 111": lambda: draw(65, 300, D=512, Dv=111, dtype=BF16, causal=True),
    "prefill, strided": _strided,
    "one block of keys": lambda: draw(130, 77, B=2, Hq=6, Hkv=2, D=64, dtype=BF16),
    "one block of keys, D 40": lambda: draw(65, 128, B=2, Hq=4, D=40, dtype=F16),
    "one block of keys, causal": lambda: draw(
        70, 100, B=40, Hq=16, Hkv=4, D=80, dtype=BF16, causal=True
    ),
    "few keys of many heads": lambda: draw(70, 200, B=70, Hq=8, D=64, dtype=F16),
    "few keys of wide heads": lambda: draw(
        70, 62, B=40, Hq=6, Hkv=3, D=192, Dv=128, dtype=BF16, causal=True
    ),
    "bias and sinks": lambda: draw(
        163, 300, B=2, Hq=4, dtype=BF16, bias=torch.randn(4, 163, 300), sinks=torch.randn(4)
    ),
    "shared bias": lambda: draw(63, 111, B=2, Hq=4, dtype=F32, bias=torch.randn(111)),
    "kv_lens": lambda: draw(
        140, 300, B=4, dtype=BF16, kv_lens=torch.tensor([0, 1, 256, 300]), causal=True
    ),
    "varlen": lambda: draw_varlen(
        [1, 0, 263, 5, 130], [300, 7, 263, 0, 211], dtype=BF16, causal=True, sinks=torch.randn(4)
    ),
    "varlen, D 80": lambda: draw_varlen([63, 17], [63, 17], D=80, dtype=F16, window=(30, 0)),
    "decode": lambda: _decode(3001, D=128, dtype=BF16),
    "decode, Dv 1": lambda: _decode(601, D=128, Dv=1, dtype=BF16),
    "decode, fp32, D 33": lambda: _decode(601, D=33, dtype=F32),
    "decode, pages of 16": lambda: _decode(601, 16, D=128, dtype=BF16),
    "decode, pages of 256": lambda: _decode(1301, 256, D=64, dtype=F16),
    "decode, many sequences": lambda: _many_decodes(601, D=128, dtype=BF16),
    "decode, pages of 24, D 80": lambda: _decode(601, 24, D=80, Dv=33, dtype=BF16),
    "wrong kv_lens": lambda: _wrong_lengths(0, D=64),
    "wrong kv_lens, D 256": lambda: _wrong_lengths(1, D=256),
    "wrong offsets": lambda: _wrong_offsets(0, D=64),
    "wrong offsets, D 128": lambda: _wrong_offsets(1, D=128, Hq=16),
    "wrong offsets, D 256": lambda: _wrong_offsets(2, D=256),
    "decode, wrong kv_lens": lambda: (
        spoil_lengths(random.Random(0), _decode(1301, 256, D=64, dtype=BF16)).case
    ),
    "decode, wrong pages of 16": lambda: (
        spoil_pages(random.Random(0), _decode(601, 16, D=128, dtype=BF16)).case
    ),
    "decode, wrong pages of 256": lambda: (
        spoil_pages(random.Random(1), _decode(1301, 256, D=64, dtype=BF16)).case
    ),
}


def run_sample(name: str, only: str | None) -> None:
    """Every kernel that takes the sample, its gradients included."""
    torch.manual_seed(0)
    case = SAMPLES[name]()
    case = Case({n: x.cuda() for n, x in case.tensors.items()}, case.options)
    derivable = case.layout != "paged"
    douts = tuple(x.cuda() for x in draw_douts(case)) if derivable else None
    forward = {kernel.name for kernel in supporting(case)}
    backward = {kernel.name for kernel in supporting(case, backward=True)} if derivable else set()
    for kernel in sorted(forward if only is None else forward & {only}):
        # The first two go through Triton's launcher, the third straight to the driver.
        for _ in range(3):
            run(case, douts=douts if kernel in backward else None, kernel=kernel)
            torch.cuda.synchronize()
        print(f"ran {kernel}{', with gradients' if kernel in backward else ''}")


def check_sample(name: str, tool: str, only: str | None) -> tuple[str, str]:
    """What came of it (`CLEAN`, `UNUSED` or `DIRTY`), and what was run or found."""
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--print-limit", "3"]
    command += [sys.executable, __file__, "--sample", name]
    command += [] if only is None else ["--kernel", only]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        ran = [line[4:] for line in result.stdout.splitlines() if line.startswith("ran ")]
        return (CLEAN, "; ".join(ran)) if ran else (UNUSED, "no kernel takes it")
    return DIRTY, (result.stdout + result.stderr)[-4000:]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tool", default="memcheck", help="a tool of compute-sanitizer (memcheck)")
    parser.add_argument("--match", default="", help="only samples whose names contain this")
    parser.add_argument("--kernel", help="only this kernel")
    parser.add_argument(
        "--processes", type=int, default=os.cpu_count(), help="samples at once (one per core)"
    )
    parser.add_argument("--sample", choices=SAMPLES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: needs a CUDA device: none is here", file=sys.stderr)
        return UNUSABLE
    if options.sample is not None:
        run_sample(options.sample, options.kernel)
        return 0
    names = [name for name in SAMPLES if options.match in name]
    if not names or shutil.which("compute-sanitizer") is None:
        what = "compute-sanitizer on the PATH" if names else f"--match of one of {list(SAMPLES)}"
        print(f"error: needs {what}", file=sys.stderr)
        return UNUSABLE
    outcomes = []
    with ThreadPoolExecutor(options.processes) as pool:
        work = {pool.submit(check_sample, n, options.tool, options.kernel): n for n in names}
        for done in as_completed(work):
            outcome, what = done.result()
            outcomes.append(outcome)
            print(f"{outcome}  {work[done]}: {what}", flush=True)
    return report(options.tool, outcomes)


def report(tool: str, outcomes: list[str]) -> int:
    """Print what came of all samples; the exit status."""
    ran = len(outcomes) - outcomes.count(UNUSED)
    unused = f", {outcomes.count(UNUSED)} that no kernel takes" if UNUSED in outcomes else ""
    print(f"{tool}: {outcomes.count(CLEAN)} of {ran} samples clean{unused}")
    if not ran:
        return UNUSABLE
    return FAILED if DIRTY in outcomes else 0


if __name__ == "__main__":
    raise SystemExit(main())
