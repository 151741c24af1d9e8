"""Machine code: the instructions a kernel is meant to become, beside the right Python line."""

from __future__ import annotations

import pytest

from lockstep import simt
from lockstep.simt import bfloat16, ct, cuda, float16, float32, int32
from lockstep.simt.cuda_cpp import emit
from lockstep.simt.samples import kernels
from lockstep.simt.sass import cuda_source, disassemble, sass_listing, show

pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")
from lockstep.simt.nvrtc import compile_source

MATMUL = {"a": float16[:, :], "b": float16[:, :], "K": 64, "DTYPE": float16}


def sass(kernel, arch="sm_90", threads=None, **arguments):
    return disassemble(compile_source(emit(kernel.typed(**arguments), threads=threads), arch))


@simt.kernel
def dynamic_register_index(x: float32[:], pick: int32):
    v = cuda.local.array(64, float32)
    for i in range(64):
        v[(i * pick) & 63] = x[i]
    x[0] = v[pick & 63]


@simt.kernel
def exponentials(x: float32[:], y: float32[:]):
    i = cuda.threadIdx.x
    x[i] = cuda.exp2(x[i])
    y[i] = ct.exp2(y[i])


def text_of(line):
    return line[0].loc.text.strip()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
class TestInstructions:
    def test_matmul_uses_tensor_cores(self, arch):
        code = sass(kernels.matmul, arch, **MATMUL)
        assert code.count("HMMA") == 2  # a 16x16x16 product is two instructions
        assert code.count("LDSM") == 2

    def test_bfloat16_operands_are_loaded_like_float16(self, arch):
        bf16 = {"a": bfloat16[:, :], "b": bfloat16[:, :], "K": 64, "DTYPE": bfloat16}
        code = sass(kernels.matmul, arch, **bf16)
        assert code.count("HMMA") == 2
        assert code.count("LDSM") == 2
        assert not any(i.opcode.split(".")[0] == "LD" for i in code.instructions)

    def test_asynchronous_copies(self, arch):
        code = sass(kernels.async_copy, arch, WIDTH=4, STRIDE=4)
        assert code.count("LDGSTS") == 1
        assert code.count("LDGSTS.E.BYPASS.128") == 1
        assert code.count("LDG") == code.count("STS") == 0

    def test_vectors_move_in_one_instruction(self, arch):
        code = sass(kernels.half_vector_scale, arch)
        loads = [i.opcode for i in code.instructions if i.opcode.startswith("LDG")]
        stores = [i.opcode for i in code.instructions if i.opcode.startswith("STG")]
        assert len(loads) == len(stores) == 1
        assert "128" in loads[0]
        assert "128" in stores[0]

    def test_shuffles_votes_and_atomics(self, arch):
        assert sass(kernels.shuffle_sum, arch).count("SHFL") >= 12
        assert sass(kernels.votes, arch).count("VOTE") == 3
        histogram = sass(kernels.histogram, arch, BINS=64)
        assert histogram.count("ATOMS") >= 1
        assert histogram.count("RED") + histogram.count("REDG") >= 1  # Hopper's has a G

    def test_constant_time_select_does_not_branch_on_values(self, arch):
        code = sass(kernels.oblivious_max, arch)
        chosen = [line for line in code.by_line().values() if "ct.select" in text_of(line)]
        assert len(chosen) == 2
        for line in chosen:
            assert any(i.opcode.startswith(("SEL", "FSEL")) for i in line)
            assert not any(i.opcode.startswith(("BRA", "BSSY")) for i in line)

    def test_constant_time_exponentials_have_no_predicates(self, arch):
        code = sass(exponentials, arch)
        for name, steps in (("cuda.exp2", 2), ("ct.exp2", 0)):
            (line,) = (line for line in code.by_line().values() if name in text_of(line))
            assert sum(i.opcode.startswith("MUFU.EX2") for i in line) == 1
            assert sum(i.text.startswith("@") for i in line) == steps


def test_instructions_stand_beside_their_python_line():
    code = sass(kernels.matmul, **MATMUL)
    for line in code.by_line().values():
        opcodes = {i.opcode.split(".")[0] for i in line}
        assert ("HMMA" in opcodes) == ("mma_sync" in text_of(line))
        # loads of fragments come from inlined header code, and still find their line
        assert ("LDSM" in opcodes) == ("wmma.load" in text_of(line))


def test_spills_and_stack_are_told():
    # registers a dynamic index runs through live in local memory
    assert sass(dynamic_register_index).resources.stack == 64 * 4
    plain = sass(kernels.local_sort).resources
    assert (plain.stack, plain.spill_stores, plain.spill_loads) == (0, 0, 0)


def test_listing():
    listing = sass_listing(kernels.tree_sum, "sm_80", threads=256, NEIGHBOURS=False)
    head, *rest = listing.splitlines()
    assert head.startswith("tree_sum for sm_80: ")
    assert "1024 bytes of static shared memory" in head
    at = next(i for i, line in enumerate(rest) if line.endswith(": cuda.syncthreads()"))
    assert any("BAR.SYNC" in line for line in rest[at + 1 : at + 4])


def test_show():
    assert show(kernels.vector_copy, "cuda") == cuda_source(kernels.vector_copy)
    assert "LDG.E.128" in show(kernels.vector_copy, "sass", arch="sm_80")
    with pytest.raises(ValueError, match="what is 'ptx', takes 'cuda' or 'sass'"):
        show(kernels.vector_copy, "ptx")
