"""Where the compiler puts what a Hopper kernel keeps in shared memory.

The memory of an mbarrier must be that of nothing else, unless the barrier is invalidated first
(`mbarrier.inval`): the hardware may write a barrier back to where it was made. It did so on a GPU
that several processes share, into tiles that had the memory of barriers without any use.
"""

from __future__ import annotations

import re
import tempfile
from math import prod
from typing import NamedTuple

from triton._C.libtriton import ir, nvidia, passes
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

BYTES = {"i64": 8, "i32": 4, "f32": 4, "bf16": 2, "f16": 2}


class Place(NamedTuple):
    """Bytes of shared memory. What the compiler itself keeps there for a while has no size in the
    text of a kernel, and is taken to be one byte."""

    name: str
    begin: int
    end: int
    is_barrier: bool


def with_offsets(ttgir: str) -> str:
    """A kernel with the offsets that Triton gives to its shared memory, by Triton's own passes."""
    context = ir.context()
    ir.load_dialects(context)
    make_backend(GPUTarget("cuda", 90, 32)).load_dialects(context)
    with tempfile.NamedTemporaryFile("w", suffix=".ttgir") as file:
        file.write(ttgir)
        file.flush()
        module = ir.parse_mlir_module(file.name, context)
    manager = ir.pass_manager(context)
    passes.ttgpuir.add_combine_tensor_select_and_if(manager)
    passes.ttgpuir.add_allocate_warp_groups(manager)
    passes.convert.add_scf_to_cf(manager)
    passes.gluon.add_inliner(manager)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(manager, 90, 80)
    manager.run(module, "allocate")
    return str(module)


def places(ttgir: str) -> list[Place]:
    found = []
    for line in with_offsets(ttgir).splitlines():
        offset = re.search(r"allocation\.offset = (\d+)", line)
        if offset is None:
            continue
        begin, size, kind = int(offset[1]), 1, ""
        made = re.search(r"ttg\.local_alloc.*-> !ttg\.memdesc<([\dx]+)x(\w+),", line)
        if made:
            kind = made[2]
            size = prod(map(int, made[1].split("x"))) * BYTES[kind]
        found.append(Place(line.split()[0], begin, begin + size, kind == "i64"))
    return found


def shared_with_barriers(ttgir: str) -> list[tuple[Place, Place]]:
    """The mbarriers of a kernel, each with something else that has some of its memory."""
    all_places = places(ttgir)
    barriers = [place for place in all_places if place.is_barrier]
    assert barriers
    return [
        (barrier, other)
        for barrier in barriers
        for other in all_places
        if other is not barrier and other.begin < barrier.end and barrier.begin < other.end
    ]
