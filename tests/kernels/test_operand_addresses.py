"""Products of sm_90 that read from where nothing was put are found in the text of machine code."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from operand_addresses import lost_in

FOUND = """
    S2UR UR4, SR_CgaCtaId
    UMOV UR5, 0x400
    ULEA UR5, UR4, UR5, 0x18
    USHF.R.U32.HI UR34, URZ, 0x4, UR5
    UMOV UR33, 0x40000020
    HGMMA.64x32x16.F32.BF16 R56, R28, gdesc[UR32].tnspB, R56, gsb0
    EXIT
"""
SET = "USHF.R.U32.HI UR34, URZ, 0x4, UR5"
# Before it, a jump over the only instruction that sets the address.
BRANCH = FOUND.replace(SET, f"@P0 BRA 0x50\n    {SET}")
SPILLED = FOUND.replace(SET, "STL [R1+0x8], R5\n    LDL R6, [R1+0x8]\n    R2UR UR34, R6")


def numbered(text: str) -> str:
    lines = text.strip().splitlines()
    return "\n".join(f"/*{16 * i:04x}*/  {line.strip()} ;" for i, line in enumerate(lines))


@pytest.mark.parametrize(
    ("text", "register"),
    [
        (FOUND, None),
        # What ptxas made of rows of 64 bytes: the register is never set.
        (FOUND.replace(SET, "NOP"), "UR34"),
        (BRANCH, "UR34"),
        (FOUND.replace(SET, "LDC UR34, c[0x0][0x210]"), "UR34"),
        (SPILLED.replace("UMOV UR5, 0x400", "UMOV UR5, 0x400\n    MOV R5, UR4"), None),
        (SPILLED, "UR34"),
        # The left operand, in memory as well, has an address of its own.
        (FOUND.replace("R28, gdesc", "gdesc"), "UR32"),
    ],
    ids=["found", "never set", "on one path", "loaded", "spilled", "spilled, not set", "left"],
)
def test_lost_operands_are_noticed(text, register):
    product = next(line.strip() for line in text.splitlines() if "HGMMA" in line)
    assert lost_in(numbered(text)) == ([f"{product}: {register}"] if register else [])
