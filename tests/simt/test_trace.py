"""What the machine counts: figures worked out by hand, the report, the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import simt_attention
import typer
from rich.console import Console
from simt_support import marked
from typer.testing import CliRunner

from lockstep import simt
from lockstep.simt import Constant, cli, cuda, float16, float32, int32, wmma

FULL = 0xFFFFFFFF


def zeros(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.zeros(shape, dtype)


@simt.kernel
def copy(x: float32[:], y: float32[:], STRIDE: Constant, SHIFT: Constant):
    i = cuda.grid(1) * STRIDE + SHIFT
    y[cuda.grid(1)] = x[i]


@pytest.mark.parametrize(
    ("stride", "shift", "sectors"),
    [
        (1, 0, 4),  # 128 bytes in a row
        (1, 1, 5),  # the same, not aligned
        (2, 0, 8),
        (8, 0, 32),  # a sector each
        (0, 3, 1),  # the same element for all
    ],
)
def test_sectors_of_a_warp(stride, shift, sectors):
    trace = copy[3, 64](zeros(192 * 9), zeros(192), stride, shift).check()
    totals = trace.totals
    assert totals.global_requests == 12
    assert totals.global_load_sectors == 6 * sectors
    assert totals.global_store_sectors == 6 * 4
    assert totals.ideal_sectors == 6 * (min(sectors, 4) + 4)
    assert totals.bytes == {"global": 192 * 8}


def test_sectors_of_views_and_partial_warps():
    trace = copy[1, 8](zeros(40)[4:], zeros(8), 1, 0)  # 32 bytes across a sector border
    assert trace.totals.global_load_sectors == 2
    assert trace.totals.ideal_sectors == 2


@simt.kernel
def columns(out: float32[:], WIDTH: Constant, STEP: Constant):
    tile = cuda.shared.array(32 * 33, float32)
    t = cuda.threadIdx.x
    for i in range(t, 32 * 33, 32):
        tile[i] = 0.0
    cuda.syncthreads()
    out[t] = tile[(t * STEP) % (32 * WIDTH)]  # !


@pytest.mark.parametrize(
    ("width", "step", "wavefronts"),
    [(32, 1, 1), (32, 2, 2), (32, 4, 4), (32, 32, 32), (33, 33, 1), (32, 0, 1), (32, 3, 1)],
)
def test_bank_conflicts(width, step, wavefronts):
    trace = columns[5, 32](zeros(32), width, step)
    line = trace.line(marked(columns)).counts
    assert line.shared_wavefronts == 5 * wavefronts
    assert line.bank_conflicts == 5 * (wavefronts - 1)


def test_sixteen_bit_neighbours_share_a_word():
    @simt.kernel
    def halves(out: float32[:], STEP: Constant):
        tile = cuda.shared.array(2048, float16)
        t = cuda.threadIdx.x
        for i in range(t, 2048, 32):
            tile[i] = float16(0.0)
        cuda.syncthreads()
        out[t] = float32(tile[t * STEP])  # !

    for step, wavefronts in ((1, 1), (2, 1), (32, 16), (34, 1)):
        line = halves[1, 32](zeros(32), step).check().line(marked(halves)).counts
        assert line.shared_wavefronts == wavefronts


@pytest.mark.parametrize(("width", "wavefronts"), [(2, 2), (4, 4)])
def test_vectors_go_by_parts_of_a_warp(width, wavefronts):
    @simt.kernel
    def vectors(x: float32[:], WIDTH: Constant):
        tile = cuda.shared.array(128, float32)
        t = cuda.threadIdx.x
        v = cuda.vload(x, WIDTH * t, WIDTH)
        cuda.vstore(tile, WIDTH * t, v)  # !

    trace = vectors[1, 32](zeros(128), width).check()
    line = trace.line(marked(vectors)).counts
    assert (line.shared_wavefronts, line.bank_conflicts) == (wavefronts, 0)
    assert trace.totals.global_requests == 1
    assert trace.totals.global_sectors == 32 * width * 4 // 32


@pytest.mark.parametrize(
    ("lanes", "spread", "width", "wavefronts"),
    [
        (32, 1, 4, 4),  # quarters of the warp
        (32, 0, 4, 2),  # all lanes ask for the same: halves
        (32, 0, 2, 1),
        (16, 1, 4, 2),  # what has no lanes costs nothing
        (8, 1, 4, 1),
        (8, 1, 2, 1),
        (1, 1, 4, 1),
    ],
)
def test_parts_of_a_warp_that_ask_for_the_same_or_are_not_there(lanes, spread, width, wavefronts):
    """As an H200 counts it: benchmarks/ladder_vs_gpu.py."""

    @simt.kernel
    def vectors(out: float32[:], LANES: Constant, SPREAD: Constant, WIDTH: Constant):
        tile = cuda.shared.array(128, float32)
        t = cuda.threadIdx.x
        for i in range(t, 128, 32):
            tile[i] = 0.0
        cuda.syncthreads()
        if t < LANES:
            v = cuda.vload(tile, t * SPREAD * WIDTH, WIDTH)  # !
            out[t] = v[0]

    trace = vectors[1, 32](zeros(32), lanes, spread, width).check()
    line = trace.line(marked(vectors)).counts
    assert (line.shared_wavefronts, line.bank_conflicts) == (wavefronts, 0)


@pytest.mark.parametrize(("pad", "wavefronts"), [(0, 4 * 4), (8, 4)])
def test_fragment_loads(pad, wavefronts):
    @simt.kernel
    def load(out: float32[:], PAD: Constant):
        tile = cuda.shared.array((16, 32 + PAD), float16)
        for i in range(cuda.threadIdx.x, 16 * (32 + PAD), 32):
            tile[i // (32 + PAD), i % (32 + PAD)] = float16(0.0)
        cuda.syncthreads()
        a = wmma.load_a(tile, (0, 0))  # !
        b = wmma.load_b(tile, (0, 16))
        wmma.store(out, 0, wmma.mma_sync(a, b, wmma.fill(0.0)), 16)

    trace = load[1, 32](zeros(256), pad).check()
    assert trace.line(marked(load)).counts.shared_wavefronts == wavefronts
    assert trace.totals.by_kind["mma"] == 1


def test_divergence_and_active_lanes():
    @simt.kernel
    def diverge(x: float32[:]):
        t = cuda.threadIdx.x
        if t % 2 == 0:  # ?
            x[t] = 1.0  # !
        if t < 32:
            x[t] = 2.0

    trace = diverge[2, 64](zeros(128)[:64].copy())
    assert trace.line(marked(diverge, "# ?")).counts.divergent_branches == 4
    line = trace.line(marked(diverge))
    assert (line.executions, line.lanes, line.counts.active_lanes) == (4, 64, 16.0)
    assert trace.totals.divergent_branches == 4  # whole warps take the second branch


def test_instructions_by_kind_and_bytes():
    @simt.kernel
    def kinds(x: float32[:], c: int32[:]):
        t = cuda.threadIdx.x
        y = cuda.exp(x[t]) * 2.0 + float32(t)
        y += cuda.shfl_xor_sync(FULL, y, 1)
        cuda.atomic.add(c, 0, t & 3)
        x[t] = y

    trace = kinds[1, 32](zeros(32), zeros(1, dtype="int32")).check()
    assert trace.totals.by_kind == {
        "move": 1,
        "special": 1,
        "float": 3,
        "convert": 1,
        "shuffle": 1,
        "atomic": 1,
        "integer": 1,
        "global": 2,
    }
    assert trace.totals.shuffles == 1


def test_depth_follows_the_slowest_warp_between_barriers():
    @simt.kernel
    def uneven(x: float32[:], ONE: Constant):
        t = cuda.threadIdx.x
        with simt.phase("work"):
            if ONE:
                if t == 0:
                    for i in range(64):
                        x[i] = 1.0
            else:
                x[t] = 1.0
            cuda.syncthreads()

    one, all_ = (uneven[3, 64](zeros(64), flag).phase("work") for flag in (True, False))
    assert one.depth / all_.depth > 50
    assert one.thread_utilisation < 0.05
    assert all_.thread_utilisation == all_.warp_utilisation == 1.0
    assert one.warp_utilisation == pytest.approx(0.5, abs=0.05)
    depths = uneven[3, 64](zeros(64), True).depth
    assert depths.tolist() == [depths[0]] * 3


def test_attention_counts_agree_with_the_hardware():
    # measured with Nsight Compute on an H200 for this access pattern, one head, S 256, D 32
    q, k, v, out = simt_attention.problem(1, 1, 256, 32)
    totals = simt_attention.run(q, k, v, out, 256).check().totals
    assert totals.global_load_sectors == 6656
    assert totals.global_store_sectors == 1024
    assert totals.global_requests == 3328 + 256
    assert totals.ideal_sectors == totals.global_sectors


def test_trace_is_data():
    trace = copy[1, 32](zeros(64), zeros(16), 1, 0)
    data = json.loads(json.dumps(trace.to_json()))
    assert data["kernel"] == "copy"
    assert data["totals"]["global_load_sectors"] == 4
    (hazard,) = data["hazards"]
    assert (hazard["kind"], hazard["thread"]) == ("out of bounds", [16, 0, 0])
    assert [line["line"] for line in data["lines"]] == sorted(
        line["line"] for line in data["lines"]
    )
    with pytest.raises(KeyError, match="not executed"):
        trace.line(1)
    with pytest.raises(KeyError, match="no phase"):
        trace.phase("softmax")


def test_listing_annotates_the_source():
    trace = columns[2, 32](zeros(16), 32, 32)
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(trace)
    text = console.export_text()
    line = next(row for row in text.splitlines() if "tile[(t * STEP)" in row)
    assert "64 32x" in line
    assert "<- out of bounds" in line
    assert "1 hazard(s)" in text


# The command line

app = typer.Typer()
app.command()(cli.trace)
app.command()(cli.show)
runner = CliRunner()
HERE = str(Path(__file__))
SIZES = ["-a", "STRIDE=2", "-a", "SHIFT=0", "--grid", "2", "--block", "32"]


def test_cli_trace():
    result = runner.invoke(app, ["trace", f"{HERE}:copy", "-a", "x=128", "-a", "y=64", *SIZES])
    assert result.exit_code == 0, result.output
    assert "no hazards" in result.output
    result = runner.invoke(app, ["trace", f"{HERE}:copy", "-a", "x=100", "-a", "y=64", *SIZES])
    assert result.exit_code == 1
    assert "out of bounds" in result.output


def test_cli_trace_json():
    arguments = ["-a", "x=float32:128", "-a", "y=64", *SIZES, "--json"]
    result = runner.invoke(app, ["trace", f"{HERE}:copy", *arguments])
    assert json.loads(result.stdout)["totals"]["global_load_sectors"] == 16


def test_what_a_file_prints_is_not_in_the_json(tmp_path):
    path = tmp_path / "prints.py"
    path.write_text(
        "from lockstep import simt\n"
        "from lockstep.simt import cuda, float32\n\n"
        "@simt.kernel\n"
        "def ones(x: float32[:]):\n"
        "    x[cuda.grid(1)] = 1.0\n\n"
        "print('imported')\n"
    )
    arguments = [f"{path}:ones", "-a", "x=64", "--grid", "2", "--block", "32", "--json"]
    result = runner.invoke(app, ["trace", *arguments])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["kernel"] == "ones"
    assert "imported" in result.stderr


def test_cli_trace_of_a_sample():
    result = runner.invoke(app, ["trace", "transpose, not padded"])
    assert result.exit_code == 0, result.output
    assert "32x" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no such sample"], "neither FILE.py:KERNEL"),
        (["missing.py:copy"], "no file"),
        ([f"{HERE}:nothing"], "it has copy, columns"),
        ([f"{HERE}:copy", "-a", "z=1"], "one of x, y, STRIDE, SHIFT"),
        ([f"{HERE}:copy", "-a", "x=axb"], "takes a shape"),
        ([f"{HERE}:copy", "-a", "x=0x4"], "takes sizes of at least 1, got '0x4'"),
        ([f"{HERE}:copy", "-a", "x=@no/such/file.npy"], "takes an array in a .npy file, got"),
        ([f"{HERE}:copy", "-a", f"x=@{HERE}"], "takes an array in a .npy file, got"),
        ([f"{HERE}:copy", "--grid", "many", "--block", "32"], "--grid takes sizes"),
        ([f"{HERE}:copy", "--grid", "1", "--block", "32"], "missing a required argument: 'x'"),
    ],
)
def test_cli_says_what_is_wrong(arguments, message):
    result = runner.invoke(app, ["trace", *arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_cli_show():
    result = runner.invoke(app, ["show", f"{HERE}:copy", "-a", "STRIDE=2", "-a", "SHIFT=0"])
    assert result.exit_code == 0, result.output
    assert "__global__ void copy" in result.output
