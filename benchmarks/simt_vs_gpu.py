"""The lockstep machine against a GPU: same outputs, same memory transactions?

Runs every sample kernel and an attention kernel on the machine and, compiled without contraction,
on the GPU; compares the outputs bit for bit; then launches them once more under Nsight Compute and
compares global requests, global sectors and shared wavefronts. Where the compiler merged accesses
the counts cannot be equal; where the hardware is known to work differently they are not. Such rows
show both numbers.

    PYTHONPATH=src python benchmarks/simt_vs_gpu.py

Needs a CUDA GPU, the extra `gpu`, and `ncu` on the path (`--no-counters` does without). Exit status
1 if an output differs, or a count that has no reason to.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import nsight
import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from lockstep.environment import current_commit
from lockstep.output import results
from lockstep.simt import gpu, ir, nvrtc
from lockstep.simt.cuda_cpp import emit
from lockstep.simt.launch import extent
from lockstep.simt.machine import Trace
from lockstep.simt.occupancy import fit
from lockstep.simt.samples import SAMPLES, Sample

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "simt-vs-h200.json"


@dataclass
class Row:
    """One kernel: how its outputs compare, and its counts on the machine and on the GPU."""

    name: str
    kernel: str
    grid: tuple[int, ...]
    block: tuple[int, ...]
    bitwise: bool
    largest_error: float  # relative to the largest value
    tolerance: float
    why: str  # there is a tolerance
    known_difference: str
    hazards: int
    machine: dict[str, int]
    machine_seconds: float
    registers: int
    blocks_per_sm: dict[str, int]  # closed form, driver
    gpu: dict[str, int] = field(default_factory=dict)
    raw: dict[str, float] = field(default_factory=dict)  # Nsight Compute's metrics by short name

    @property
    def outputs_agree(self) -> bool:
        return self.bitwise or self.largest_error <= self.tolerance

    def verdict(self, count: str) -> str:
        """ "equal", "merged" (the compiled code has fewer accesses), "known" or "differs"."""
        ours, theirs = self.machine[count], self.gpu[count]
        if ours == theirs:
            return "equal"
        shared = ("shared_accesses", "matrix_loads")
        accesses = shared if count == "shared_wavefronts" else ("global_requests",)
        if any(self.gpu[name] < self.machine[name] for name in accesses):
            return "merged"
        return "known" if self.known_difference else "differs"


COUNTS = ("global_requests", "global_sectors", "shared_wavefronts")
MORE_COUNTS = ("shared_accesses", "shared_load_wavefronts", "shared_store_wavefronts")


def machine_counts(sample: Sample, trace: Trace) -> dict[str, int]:
    counted = {count: getattr(trace.totals, count) for count in COUNTS + MORE_COUNTS}
    return counted | {"matrix_loads": matrix_loads(sample, trace)}


def matrix_loads(sample: Sample, trace: Trace) -> int:
    """How many fragments of 16-bit numbers warps loaded from shared memory, which is one `ldmatrix`
    each. They are counted apart: other accesses to fragments are several instructions each."""
    places = {
        (stmt.loc.file, stmt.loc.line)
        for stmt in ir.walk(sample.kernel.typed(**sample.arguments()).body)
        for expr in ir.expressions(stmt)
        if isinstance(expr, ir.FragmentLoad)
        and expr.array.space is ir.Space.SHARED
        and expr.array.dtype.size == 2
    }
    return sum(
        line.counts.shared_accesses for line in trace.lines if (line.file, line.number) in places
    )


def as_json(row: Row, counting: bool) -> dict[str, Any]:
    verdicts = {f"{count}_verdict": row.verdict(count) for count in COUNTS} if counting else {}
    return asdict(row) | verdicts


def attention_sample() -> Sample:
    """The attention kernel of the tests: 45x90 tiles, 256 threads, one head of 256 tokens."""
    path = ROOT / "tests" / "simt" / "simt_attention.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    seq, dim = 256, 32

    def make(generator: torch.Generator) -> dict[str, Any]:
        q, k, v = (torch.randn(seq, dim, generator=generator).half() for _ in range(3))
        out = torch.full((seq, dim), float("nan"))
        tensors = {"q": q, "k": k, "v": v, "out": out}
        return tensors | {"seq": seq, "scale": dim**-0.5, "D": dim}

    return Sample(
        "attention, 45x90 tiles",
        module.attention,
        (-(-seq // module.BLOCK_Q), 1),
        module.THREADS,
        ("out",),
        make,
        tolerance=1e-6,
        why="CUDA's expf and NumPy's differ in the last bit",
    )


def all_samples() -> list[Sample]:
    return [*SAMPLES, attention_sample()]


def run_on_gpu(sample: Sample) -> dict[str, torch.Tensor]:
    """Outputs of a sample on the GPU, back in host memory."""
    arguments = {
        name: value.cuda() if isinstance(value, torch.Tensor) else value
        for name, value in sample.arguments().items()
    }
    grid, block = extent(sample.grid, "grid"), extent(sample.block, "block")
    bound = sample.kernel.bind(**arguments)
    gpu.launch(sample.kernel, grid, block, sample.dynamic_bytes, bound, contract=False)
    torch.cuda.synchronize()
    return {name: arguments[name].cpu() for name in sample.outputs}


def compare(sample: Sample, ours: dict[str, Any], theirs: dict[str, Any]) -> tuple[bool, float]:
    """Whether all outputs have the same bits, and the largest error relative to the largest value.

    NaN counts as poison that neither overwrote: it must be in the same places.
    """
    bitwise, error = True, 0.0
    for name in sample.outputs:
        a, b = ours[name], theirs[name]
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[a.element_size()]
        if torch.equal(a.view(bits), b.view(bits)):
            continue
        bitwise = False
        a, b = a.double(), b.double()
        if not torch.equal(a.isnan(), b.isnan()):
            return False, float("inf")
        error = max(error, float((a - b).nan_to_num().abs().max() / a.nan_to_num().abs().max()))
    return bitwise, error


def occupancy_here(sample: Sample) -> tuple[int, dict[str, int]]:
    """Registers, and blocks per multiprocessor from the closed form and from the driver."""
    block = extent(sample.block, "block")
    threads = block[0] * block[1] * block[2]
    source = emit(sample.kernel.typed(**sample.arguments()), threads=threads)
    compiled = nvrtc.compile_source(source, "sm_90", contract=False)
    resources = compiled.resources
    dynamic = sample.dynamic_bytes + source.hidden_shared
    ours = fit("H200", threads, resources.registers, resources.static_shared + dynamic)
    function = gpu.load(compiled, torch.cuda.current_device(), dynamic)
    theirs = function.occupancy.max_active_blocks_per_multiprocessor(threads, dynamic)
    return resources.registers, {"closed_form": ours.blocks, "driver": int(theirs)}


def measure(samples: list[Sample], console: Console) -> list[Row]:
    """Outputs and the machine's counts."""
    rows = []
    with Progress(console=console, transient=True) as progress:
        for sample in progress.track(samples, description="machine and GPU"):
            arguments = sample.arguments()
            launch = sample.kernel[sample.grid, sample.block, sample.dynamic_bytes]
            trace = launch.trace(**arguments)
            bitwise, error = compare(sample, arguments, run_on_gpu(sample))
            registers, blocks = occupancy_here(sample)
            rows.append(
                Row(
                    sample.name,
                    sample.kernel.__name__,
                    trace.grid,
                    trace.block,
                    bitwise,
                    error,
                    sample.tolerance,
                    sample.why,
                    sample.differs,
                    len(trace.hazards),
                    machine_counts(sample, trace),
                    round(trace.seconds, 3),
                    registers,
                    blocks,
                )
            )
    return rows


def count_on_gpu(samples: list[Sample], rows: list[Row], script: str) -> str:
    """Fill in the counts of Nsight Compute, one launch per row. Returns its version.

    `script --launch-only` must launch the samples, in order, and nothing else of their names.
    """
    names = {sample.kernel.__name__ for sample in samples}
    launches = nsight.launches_of(names, [sys.executable, script, "--launch-only"])
    if len(launches) != len(rows):
        raise SystemExit(f"ncu saw {len(launches)} launches of {len(rows)}")
    for row, raw in zip(rows, launches, strict=True):
        row.raw = raw
        row.gpu = nsight.counts(raw)
    return nsight.version()


def launch_overhead() -> dict[str, float]:
    """Host microseconds per launch, of the sample copy and of a torch addition beside it."""
    sample = SAMPLES[0]
    arguments = sample.arguments()
    x, y = arguments["x"].cuda(), arguments["y"].cuda()
    launch = sample.kernel[sample.grid, sample.block]

    def per_call(call: Any) -> float:
        for _ in range(200):
            call()
        torch.cuda.synchronize()
        best = float("inf")
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(300):
                call()
            best = min(best, time.perf_counter() - began)
            torch.cuda.synchronize()
        return round(best / 300 * 1e6, 2)

    return {
        "lockstep": per_call(lambda: launch(x, y, arguments["n"], arguments["STRIDE"])),
        "torch.add": per_call(lambda: torch.add(x, x, out=y)),
    }


def environment(ncu: str) -> dict[str, Any]:
    versions = {"python": platform.python_version(), "ncu": ncu}
    for name in ("torch", "numpy", "triton", "cuda-core", "cuda-bindings"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    versions["driver"] = driver.stdout.strip()
    versions["nvrtc"] = nvrtc.nvrtc_version()
    commit = current_commit()
    return {
        "hardware": {"gpus": [torch.cuda.get_device_name()]},
        "versions": versions,
        "commit": asdict(commit) if commit else None,
    }


def table(rows: list[Row], with_counts: bool) -> Table:
    out = Table(title="machine | GPU; one number where they are equal")
    for column in ("kernel", "outputs", "requests", "sectors", "wavefronts", "blocks/SM"):
        out.add_column(column, justify="left" if column in ("kernel", "outputs") else "right")
    for row in rows:
        same = "[green]same bits" if row.bitwise else f"within {row.largest_error:.1e}"
        cells = [row.name, same if row.outputs_agree else f"[red]{row.largest_error:.1e}"]
        for count in COUNTS:
            text = f"{row.machine[count]}"
            if with_counts and row.verdict(count) != "equal":
                colour = "red" if row.verdict(count) == "differs" else "yellow"
                text += f" | [{colour}]{row.gpu[count]} {row.verdict(count)}"
            cells.append(text)
        blocks = row.blocks_per_sm
        equal = blocks["closed_form"] == blocks["driver"]
        cells.append(f"{blocks['closed_form']}" + ("" if equal else f" | [red]{blocks['driver']}"))
        out.add_row(*cells)
    return out


def recount(samples: list[Sample], path: Path) -> None:
    """Bring the machine's side of a result up to date; the GPU's stays as it was counted."""
    result = json.loads(path.read_text(encoding="utf-8"))
    by_name = {sample.name: sample for sample in samples}
    known = {field.name for field in fields(Row)}
    for index, old in enumerate(result["rows"]):
        sample = by_name[old["name"]]
        launch = sample.kernel[sample.grid, sample.block, sample.dynamic_bytes]
        row = Row(**{name: value for name, value in old.items() if name in known})
        row.machine = machine_counts(sample, launch.trace(**sample.arguments()))
        row.gpu = nsight.counts(row.raw)
        row.known_difference = sample.differs
        result["rows"][index] = as_json(row, counting=True)
    result["machine_counted_again"] = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    results.write(result, path)


def run(
    suite: str, make_samples: Callable[[], list[Sample]], script: str, result: Path, about: str
) -> int:
    """The command line of a comparison: measure, print, write `result`. Returns the exit status."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--no-counters", action="store_true", help="compare outputs only")
    parser.add_argument("--json", type=Path, default=result, help="where the result goes")
    parser.add_argument(
        "--recount", action="store_true", help="the machine's side only, into the given result"
    )
    parser.add_argument("--launch-only", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console(width=120)
    if options.recount:
        recount(make_samples(), options.json)
        return 0
    if not torch.cuda.is_available():
        console.print("no CUDA device here", style="red")
        return 2
    samples = make_samples()
    if options.launch_only:
        for sample in samples:
            run_on_gpu(sample)
        return 0
    rows = measure(samples, console)
    counting = not options.no_counters
    if counting and shutil.which("ncu") is None:
        console.print("no ncu on the path; use --no-counters to compare outputs only", style="red")
        return 2
    ncu = count_on_gpu(samples, rows, script) if counting else ""
    overhead = launch_overhead()
    console.print(table(rows, counting))
    console.print(f"launch: {overhead['lockstep']} µs, torch.add {overhead['torch.add']} µs")
    found = {
        "suite": suite,
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "environment": environment(ncu),
        "launch_microseconds": overhead,
        "rows": [as_json(row, counting) for row in rows],
    }
    results.write(found, options.json)
    wrong = [r.name for r in rows if not r.outputs_agree]
    wrong += [r.name for r in rows if r.blocks_per_sm["closed_form"] != r.blocks_per_sm["driver"]]
    if counting:
        wrong += [r.name for r in rows if any(r.verdict(c) == "differs" for c in COUNTS)]
    for name in dict.fromkeys(wrong):
        console.print(f"disagrees: {name}", style="red")
    return 1 if wrong else 0


def main() -> int:
    return run("simt-vs-gpu", all_samples, __file__, RESULT, __doc__.splitlines()[0])


if __name__ == "__main__":
    sys.exit(main())
