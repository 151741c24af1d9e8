"""Where the parameters of a kernel lie in the constant bank, as its cubin says."""

from __future__ import annotations

import struct
from typing import NamedTuple

from lockstep.simt.errors import SimtError

# Attributes in the sections .nv.info: the place of all parameters, and of one.
_BANK, _ONE = 0x0A, 0x17
_WITH_SIZE = 0x04


class Parameter(NamedTuple):
    """Bytes `begin` to `end` of bank 0."""

    begin: int
    end: int


def read_parameters(cubin: bytes) -> tuple[Parameter, ...]:
    """The parameters of the one kernel of a cubin, in order."""
    bank, found = None, {}
    for attribute, content in _attributes(cubin):
        if attribute == _BANK:
            _, bank, _size = struct.unpack("<IHH", content[:8])
        elif attribute == _ONE:
            _, ordinal, offset, flags = struct.unpack("<IHHI", content[:12])
            found[ordinal] = offset, flags >> 18 & 0x3FFF
    if bank is None or sorted(found) != list(range(len(found))):
        raise SimtError("no parameters of a kernel in this cubin")
    places = (found[i] for i in range(len(found)))
    return tuple(Parameter(bank + at, bank + at + size) for at, size in places)


def _attributes(cubin: bytes) -> list[tuple[int, bytes]]:
    """The contents of the sections with the attributes of a kernel."""
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, n, names = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, at + i * size) for i in range(n)]
    name_at = sections[names][4]
    found = []
    for name, _, _, _, begin, length in sections:
        label = cubin[name_at + name : cubin.index(b"\0", name_at + name)]
        if not label.startswith(b".nv.info."):
            continue
        i, end = begin, begin + length
        while i < end:
            form, attribute, value = struct.unpack_from("<BBH", cubin, i)
            i += 4
            if form == _WITH_SIZE:
                found.append((attribute, cubin[i : i + value]))
                i += value
    return found
