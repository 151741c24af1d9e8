"""Compiling without a GPU, and running on one."""

from __future__ import annotations

import ctypes

import pytest
import torch

from lockstep import simt
from lockstep.simt import Constant, cuda, float16, float32, int32
from lockstep.simt.cuda_cpp import emit
from lockstep.simt.gpu import alignments, converter, launch
from lockstep.simt.launch import extent
from lockstep.simt.samples import SAMPLES, kernels
from lockstep.simt.types import bfloat16, bool_, uint32

pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")
from lockstep.simt import nvrtc, sass

on_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@simt.kernel
def add_rows(x: float32[:, :], y: float32[:, :], ROWS: Constant):
    col = cuda.grid(1)
    if col < x.shape[1]:
        for row in range(ROWS):
            y[row, col] += x[row, col]


@simt.kernel
def mistyped(x: float32[:]):
    x[0] = 1.0


def distinct_kernels():
    seen = {}
    for sample in SAMPLES:
        seen.setdefault((sample.kernel, str(sample.arguments().get("DTYPE"))), sample)
    return list(seen.values())


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path))
    nvrtc._compile.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("sample", distinct_kernels(), ids=lambda s: s.name)
def test_samples_compile_for_ampere_and_hopper(sample):
    x, y, z = extent(sample.block, "block")
    source = emit(sample.kernel.typed(**sample.arguments()), threads=x * y * z)
    for arch in ("sm_80", "sm_90"):
        compiled = nvrtc.compile_source(source, arch)
        assert compiled.cubin[:4] == b"\x7fELF"
        assert 0 < compiled.resources.registers <= 255
        # what the emitter lays out is what the assembler was given, but for padding
        reported = compiled.resources.static_shared
        assert 0 <= source.static_shared - reported < 32


def test_at_least_twelve_kernels_are_compiled():
    assert len(distinct_kernels()) >= 12


def test_compile_error_names_the_python_line():
    source = emit(mistyped.typed())
    broken = source.text.replace("x[0] = 1.0f;", "x[0] = no_such_name;")
    assert broken != source.text
    wrong = type(source)(
        source.name, broken, source.lines, source.arguments, source.static_shared, 0
    )
    with pytest.raises(nvrtc.CompileError) as caught:
        nvrtc.compile_source(wrong, "sm_90")
    text = str(caught.value)
    assert 'identifier "no_such_name" is undefined' in text
    assert "test_gpu.py" in text
    assert ": x[0] = 1.0\n" in text


def test_arch_is_checked():
    with pytest.raises(ValueError, match="arch is 'hopper'"):
        nvrtc.compile_source(emit(mistyped.typed()), "hopper")


def test_machine_code_is_read_back_from_disk(monkeypatch, tmp_path):
    source = emit(mistyped.typed())
    first = nvrtc.compile_source(source, "sm_90")
    assert len(list(tmp_path.glob("*.cubin"))) == 1
    nvrtc._compile.cache_clear()

    def refuse(*_):
        raise AssertionError("compiled again")

    monkeypatch.setattr(nvrtc, "_run_nvrtc", refuse)
    second = nvrtc.compile_source(source, "sm_90")
    assert second.cubin == first.cubin
    assert second.resources == first.resources


def test_an_unwritable_cache_is_no_obstacle(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", "/proc/no/such/place")
    assert nvrtc.compile_source(emit(mistyped.typed()), "sm_90").cubin


@pytest.mark.slow
def test_contraction_is_off_on_request():
    from lockstep.simt.sass import disassemble

    source = emit(kernels.matmul.typed(a=float16[:, :], b=float16[:, :], K=16, DTYPE=float16))
    fused = disassemble(nvrtc.compile_source(source, "sm_90", contract=True))
    plain = disassemble(nvrtc.compile_source(source, "sm_90", contract=False))
    assert fused.count("FFMA") == 8
    assert plain.count("FFMA") == 0
    assert plain.count("FMUL") == plain.count("FADD") == 8


@pytest.mark.parametrize(
    ("value", "dtype", "expected"),
    [
        (-3, int32, ctypes.c_int32(-3)),
        (2**32 - 1, uint32, ctypes.c_uint32(2**32 - 1)),
        (0.1, float32, ctypes.c_float(0.1)),
        (True, bool_, ctypes.c_bool(True)),
        (1.5, float16, ctypes.c_int16(0x3E00)),
        (1.5, bfloat16, ctypes.c_int16(0x3FC0)),
    ],
)
def test_scalars_as_the_kernel_takes_them(value, dtype, expected):
    got = converter("x", dtype)(value)
    assert type(got) is type(expected)
    assert got.value == expected.value


@pytest.mark.parametrize(("value", "dtype"), [(2**31, int32), (-1, uint32), (1.5, int32)])
def test_a_scalar_that_does_not_fit(value, dtype):
    with pytest.raises(ValueError, match="'x' takes"):
        converter("x", dtype)(value)


def test_alignment_that_wide_accesses_need():
    assert alignments(kernels.vector_copy.typed()) == {"x": 16, "y": 16}
    assert alignments(kernels.pipeline_sum.typed()) == {"x": 16}
    assert alignments(kernels.strided_copy.typed(STRIDE=1)) == {}


class TestOnGpu:
    pytestmark = on_gpu

    @pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: s.name)
    def test_same_bits_as_the_machine(self, sample):
        ours, theirs = sample.arguments(seed=1), sample.arguments(seed=1)
        sample.kernel[sample.grid, sample.block, sample.dynamic_bytes](**ours)
        for name, value in theirs.items():
            if isinstance(value, torch.Tensor):
                theirs[name] = value.cuda()
        grid, block = extent(sample.grid, "grid"), extent(sample.block, "block")
        bound = sample.kernel.bind(**theirs)
        launch(sample.kernel, grid, block, sample.dynamic_bytes, bound, contract=False)
        for name in sample.outputs:
            a, b = ours[name], theirs[name].cpu()
            if sample.tolerance:
                assert (a - b).abs().max() <= sample.tolerance * a.abs().max()
            else:
                bits = torch.int16 if a.element_size() == 2 else torch.int32
                assert torch.equal(a.view(bits), b.view(bits))

    def test_any_strides(self):
        x = torch.randn(40, 6, device="cuda").t()[:4]  # last dimension is not contiguous
        y = torch.zeros(4, 40, device="cuda")
        add_rows[1, 64](x, y, 4)
        assert torch.equal(y, x)

    def test_one_tensor_for_two_parameters(self):
        x = torch.randn(3, 50, device="cuda")
        before = x.clone()
        add_rows[1, 64](x, x, 3)
        assert torch.equal(x, 2 * before)

    def test_current_stream(self):
        x, y = torch.randn(1, 64, device="cuda"), torch.zeros(1, 64, device="cuda")
        add_rows[1, 64](x, y, 1)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        # a capture sees only what is launched on the stream it captures
        with torch.cuda.graph(graph, stream=stream):
            add_rows[1, 64](x, y, 1)
        y.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x)

    def test_misaligned_pointer_is_refused(self):
        x, y = torch.randn(1025, device="cuda"), torch.zeros(1024, device="cuda")
        with pytest.raises(ValueError, match="'x' starts at address"):
            kernels.vector_copy[1, 256](x[1:], y, 1024)

    def test_host_tensor_among_cuda_tensors(self):
        with pytest.raises(ValueError, match="'y' is on cpu"):
            kernels.vector_copy[1, 256](torch.zeros(1024, device="cuda"), torch.zeros(1024), 1024)

    def test_too_much_shared_memory(self):
        x = torch.zeros(64, dtype=torch.int32, device="cuda")
        with pytest.raises(ValueError, match="a block of this GPU may have"):
            kernels.reverse_dynamic[1, 64, 300_000](x, x.clone(), 64)


@simt.kernel
def two_phases(x: float32[:], y: float32[:], N: Constant):
    total = 0.0
    for i in range(N):
        with simt.phase("load"):
            part = x[i]
        with simt.phase("add"):
            total += part
    with simt.phase("load"):
        y[cuda.grid(1)] = total


def test_an_instrumented_build_reads_the_clock_around_phases():
    plain = emit(two_phases.typed(N=3), threads=64)
    timed = emit(two_phases.typed(N=3), threads=64, clocks=True)
    assert "clock64" not in plain.text
    assert [a.name for a in timed.arguments] == ["x", "y", "phase_cycles"]
    assert timed.text.count("begin_phase(0);") == 2
    assert timed.text.count("begin_phase(1);") == 1
    assert timed.text.count("begin_phase(2);") == 1, "the end of the kernel"
    assert nvrtc.compile_source(timed, "sm_90").cubin


@simt.kernel
def one_works(x: float32[:], y: float32[:], N: Constant):
    with simt.phase("work"):
        if cuda.threadIdx.x == 0:
            for i in range(N):
                y[0] = y[0] * x[i] + 1.0
    cuda.syncthreads()
    with simt.phase("rest"):
        y[1 + cuda.threadIdx.x] = x[0]


def test_the_clock_waits_for_a_barrier():
    """The time that warps wait for another belongs to the phase that is still going on."""
    plain = emit(one_works.typed(N=3), threads=64)
    timed = emit(one_works.typed(N=3), threads=64, clocks=True)
    assert "__syncthreads();" in plain.text
    assert "__syncthreads();" not in timed.text
    listing = sass.disassemble(nvrtc.compile_source(timed, "sm_90"))
    opcodes = [instruction.opcode for instruction in listing.instructions]
    barrier = next(i for i, name in enumerate(opcodes) if name.startswith("BAR"))
    clock = next(i for i in range(barrier, len(opcodes)) if opcodes[i].startswith("CS2R"))
    # What the barrier returns decides a branch before the clock is read.
    assert "BRA" in "".join(opcodes[barrier:clock])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_waiting_at_a_barrier_counts_in_its_phase():
    x, y = torch.ones(3000, device="cuda"), torch.zeros(1 + 128, device="cuda")
    cycles = torch.zeros(3, dtype=torch.int64, device="cuda")
    launch(one_works, (1, 1, 1), (128, 1, 1), 0, {"x": x, "y": y, "N": 3000}, clocks=cycles)
    work, rest, whole = cycles.tolist()
    assert work > 0.9 * whole
    assert rest < 0.1 * whole


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cycles_of_phases_on_the_gpu():
    x, y = torch.ones(300, device="cuda"), torch.zeros(64, device="cuda")
    cycles = torch.zeros(3, dtype=torch.int64, device="cuda")
    launch(two_phases, (1, 1, 1), (64, 1, 1), 0, {"x": x, "y": y, "N": 300}, clocks=cycles)
    load, add, whole = cycles.tolist()
    assert y.tolist() == [300.0] * 64
    # A load returns at once; the addition waits for the number.
    assert add > load > 0
    assert load + add <= whole
