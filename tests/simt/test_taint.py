"""Planted leaks in small kernels, each found where it is; and kernels without any."""

from __future__ import annotations

import pytest

from lockstep.audit.timing.gpu_leaks import GPU_LEAKS, look_up
from lockstep.simt.cuda_cpp import emit

pytest.importorskip("cuda.core", reason="the extra 'gpu' is not installed")
from lockstep.simt.nvrtc import compile_source
from lockstep.simt.samples import kernels
from lockstep.simt.taint import find_leaks
from lockstep.simt.taint.analysis import analyze
from lockstep.simt.taint.code import parse
from lockstep.simt.taint.parameters import Parameter
from lockstep.simt.taint.waits import polls_memory, wait_loops

KINDS = {
    "early exit on a zero row": "branch",
    "skipped rescale": "branch",
    "table look-up by value": "address",
    "trip count by value": "branch",
    "subnormal slow path": "branch",
}


def leaks(kernel, arch, public=(), **arguments):
    compiled = compile_source(emit(kernel.typed(**arguments), threads=64), arch)
    return find_leaks(compiled.cubin, public)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", GPU_LEAKS)
def test_planted_leaks_are_found(name, arch):
    found = leaks(GPU_LEAKS[name].kernel, arch)
    assert KINDS[name] in {leak.kind for leak in found}
    assert all(leak.line > 0 and leak.text for leak in found)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_a_constant_time_select_does_not_leak(arch):
    assert not leaks(kernels.oblivious_max, arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_what_is_public_may_choose(arch):
    inputs = range(6)  # x and the table: a pointer, and what comes with it, of each
    assert leaks(look_up, arch)
    assert not leaks(look_up, arch, public=inputs)


WAITS = """
        /*0000*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0010*/              @!P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0020*/                   FADD R0, R0, R1 ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
        /*0040*/                   EXIT ;
.L_x_2:
        /*0050*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R2 ;
        /*0060*/              @!P0 BRA `(.L_x_2) ;
        /*0070*/                   BRA `(.L_x_1) ;
"""


POLLS = """
.L_x_1:
        /*0000*/                   LDG.E.STRONG.GPU R9, desc[UR4][R2.64] ;
        /*0010*/                   CCTL.IVALL ;
        /*0020*/                   ISETP.NE.U32.AND P1, PT, R9, R6, PT ;
        /*0030*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0040*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*0050*/                   ISETP.NE.U32.AND P1, PT, R9, R6, PT ;
        /*0060*/               @P1 BRA `(.L_x_2) ;
        /*0070*/                   EXIT ;
"""


def test_loops_that_wait_are_told_from_others():
    assert wait_loops(parse(WAITS)) == {5, 6, 7}
    assert not polls_memory(parse(WAITS))
    assert wait_loops(parse(POLLS)) == {0, 1, 2, 3}
    assert polls_memory(parse(POLLS))


# R4 points into the secret buffer, R6 into the public one; R2 becomes secret.
BEGIN = (
    "LDC.64 R4, c[0x0][0x210]",
    "LDC.64 R6, c[0x0][0x218]",
    "LDG.E R2, desc[UR4][R4.64]",
    "S2UR UR5, SR_CgaCtaId",
    "ISETP.GE.AND P1, PT, R8, UR9, PT",
    "UISETP.GE.AND UP1, UPT, UR8, UR9, UPT",
)
PACKED = (
    "LOP3.LUT R9, R9, 0xfffffffe, RZ, 0xc0, !PT",
    "@P1 LOP3.LUT R9, R9, 0x1, RZ, 0xfc, !PT",
    "ISETP.GE.AND P0, PT, R2, RZ, PT",
    "@P0 LOP3.LUT R9, R9, 0x2, RZ, 0xfc, !PT",
    "STL [R1+0x8], R9",
    "LDL R9, [R1+0x8]",
)
# R20, a secret, and R21, which is none, are kept side by side.
PAIR = (
    "MOV R20, R2",
    "MOV R21, R8",
    "STL.64 [R1+0x8], R20",
    "LDL.64 R14, [R1+0x8]",
)
# A secret is copied to shared memory at UR32, if UP3 is on; R3 is read elsewhere.
COPIED = (
    "UMOV UR4, 0x400",
    "ULEA UR4, UR5, UR4, 0x18",
    "STS [UR4+0x100], R8",
    "VOTEU.ANY UP3, P1",
    "VOTEU.ANY UP2, P1",
)
READ = ("LDS R3, [UR4+0x100]", "ISETP.NE.AND P0, PT, R3, RZ, PT", "@P0 EXIT")
# UR16 and UR17, secret before, point into the public buffer if UP1 is off.
CHOSEN = (
    "R2UR UR16, R2",
    "R2UR UR17, R2",
    "R2UR UR10, R6",
    "R2UR UR11, R7",
    "@!UP1 UMOV UR16, UR10",
    "@!UP1 UMOV UR17, UR11",
    "PLOP3.LUT P0, PT, PT, PT, UP1, 0x80, 0x0",
    "IMAD.U32 R10, RZ, RZ, UR16",
    "IMAD.U32 R11, RZ, RZ, UR17",
)


VOTED = (*COPIED, "R2UR UR32, R2", "@P1 R2UR UR32, R8", "ISETP.GE.AND P1, PT, R8, UR8, PT")
JOINED = ("MOV R16, R8", ".L_x_1:", "ISETP.NE.AND P0, PT, R16, RZ, PT", "@P0 EXIT")


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        # Descriptors: of the second factor alone where the first is in registers.
        (["R2UR UR29, R2", "HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR28], R88"], []),
        (["R2UR UR31, R2", "HGMMA.64x64x16.F32.BF16 R88, R24, gdesc[UR28], R88"], ["address"]),
        (["R2UR UR29, R2", "HGMMA.64x64x16.F32.BF16 R88, gdesc[UR28], R88"], ["address"]),
        (["R2UR UR8, R2", "UTMALDG.2D [UR20], [UR6]"], []),
        (["R2UR UR7, R2", "UTMALDG.2D [UR20], [UR6]"], ["address"]),
        (["R2UR UR23, R2", "UTMALDG.2D [UR20], [UR6]"], ["address"]),
        # Predicates in a register that was kept in local memory.
        ([*PACKED, "LOP3.LUT P2, RZ, R9, 0x1, RZ, 0xc0, !PT", "@P2 EXIT"], []),
        ([*PACKED, "LOP3.LUT P2, RZ, R9, 0x2, RZ, 0xc0, !PT", "@P2 EXIT"], ["branch"]),
        # One of two registers that were kept there together.
        ([*PAIR, "ISETP.NE.AND P0, PT, R15, RZ, PT", "@P0 EXIT"], []),
        ([*PAIR, "ISETP.NE.AND P0, PT, R14, RZ, PT", "@P0 EXIT"], ["branch"]),
        (
            [*PAIR, "@P1 LDL.64 R14, [R1+0x8]", "ISETP.NE.AND P0, PT, R15, RZ, PT", "@P0 EXIT"],
            ["branch"],
        ),
        # A copy to an address that is known if it takes place.
        (
            [*COPIED, "@UP3 UIADD3 UR32, UR4, 0x4000, URZ", "@UP2 UTMALDG.2D [UR32], [UR6]", *READ],
            [],
        ),
        (
            [*COPIED, "@UP3 UIADD3 UR32, UR4, 0x4000, URZ", "@UP1 UTMALDG.2D [UR32], [UR6]", *READ],
            ["branch"],
        ),
        # Known under one of two equal predicates, and used under the other when the first is gone.
        (
            [
                *COPIED,
                "@UP3 UIADD3 UR32, UR4, 0x4000, URZ",
                "UISETP.LT.AND UP3, UPT, UR8, 0x1, UPT",
                "@UP2 UTMALDG.2D [UR32], [UR6]",
                *READ,
            ],
            [],
        ),
        (
            [
                *COPIED,
                "@UP3 UIADD3 UR32, UR4, 0x4000, URZ",
                "UISETP.LT.AND UP3, UPT, UR8, 0x1, UPT",
                "@UP3 UTMALDG.2D [UR32], [UR6]",
                *READ,
            ],
            ["branch"],
        ),
        (
            [
                *COPIED,
                "ELECT P0, URZ, PT",
                "@P0 VIADD R3, R12, 0x4000",
                "@P0 R2UR UR32, R3",
                "UTMALDG.2D [UR32], [UR6]",
                *READ,
            ],
            [],
        ),
        (
            [
                *COPIED,
                "@P1 VIADD R3, R12, 0x4000",
                "@P1 R2UR UR32, R3",
                "UTMALDG.2D [UR32], [UR6]",
                *READ,
            ],
            ["branch"],
        ),
        # A register of all lanes, which is written if there is a vote for it.
        ([*VOTED, "@UP2 UTMALDG.2D [UR32], [UR6]"], []),
        ([*VOTED, "@UP1 UTMALDG.2D [UR32], [UR6]"], ["address"]),
        # A register that lanes set before they jump, and others after that.
        (["MOV R16, R2", "@P1 MOV R16, R8", "@P1 BRA `(.L_x_1)", *JOINED], []),
        (["MOV R16, R2", "@P1 MOV R16, R8", "@!P1 BRA `(.L_x_1)", *JOINED], ["branch"]),
        # An address under the condition that it was set under.
        ([*CHOSEN, "@!P0 LDG.E R12, desc[UR4][R10.64]"], []),
        ([*CHOSEN, "@P0 LDG.E R12, desc[UR4][R10.64]"], ["address"]),
        (
            [
                *CHOSEN[:6],
                "UISETP.GE.AND UP1, UPT, UR8, UR9, UPT",
                *CHOSEN[6:],
                "@!P0 LDG.E R12, desc[UR4][R10.64]",
            ],
            ["address"],
        ),
    ],
)
def test_what_is_known_of_addresses_and_predicates(lines, kinds):
    if "R12" in " ".join(lines):
        lines = [*lines[:2], "IMAD.U32 R12, RZ, RZ, UR4", *lines[2:]]
    lines = enumerate([*BEGIN, *lines, "EXIT"])
    text = "\n".join(x if x.endswith(":") else f"  /*{16 * i:04x}*/  {x} ;" for i, x in lines)
    parameters = (Parameter(0x210, 0x218), Parameter(0x218, 0x220))
    found = analyze(parse(text), parameters, public={1})
    assert [leak.kind for leak in found] == kinds
