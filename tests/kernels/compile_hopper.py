"""Compiles kernels of the Hopper path, those that its arguments name, and says with which Triton;
and whether launches know the parameters of a kernel that it compiles.

Kernels behind an argument `--to-layouts` are compiled up to Triton's own code, where the names of
Gluon and what may be done with them are all there is to go wrong, in a fifth of the time.

For `test_hopper_versions.py`, which runs it with other versions of Triton first in the path.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import triton

# This is no test, so nothing has put the helpers of all tests into the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from hopper_build import Build, compile_for_hopper, count
from launch_arguments import bind
from problems import unwritten
from test_driver import sizes_in
from test_hopper_backward_build import compiled, partition_barriers
from test_hopper_backward_wide import compiled as compiled_wide
from test_hopper_build import build
from test_hopper_decode import tensors_of
from toy_kernel import ARGUMENTS, toy
from triton.backends.nvidia.compiler import CUDABackend

from lockstep.kernels.driver import parameters_of
from lockstep.kernels.hopper.decode.launch import decode_launches
from lockstep.kernels.hopper.forward.launch import forward_launches
from lockstep.problem import Options, Tensors, describe


def all_of(launches: Any, tensors: Tensors, **options: bool) -> Build:
    """The first kernel of a call, all of whose kernels are compiled."""
    call = launches(describe(tensors, Options(**options)), tensors, 132)
    builds = [
        compile_for_hopper(launch.kernel, arguments, **launch.options)
        for launch, arguments in bind(call, tensors).values()
    ]
    return builds[0]


KERNELS = {
    "forward": lambda: build(128, options={"causal": True}.items()),
    "few keys": lambda: all_of(forward_launches, unwritten(197, 197, B=8, Hq=12, Hkv=12)),
    "one block": lambda: all_of(forward_launches, unwritten(4096, 77, B=2, Hq=10, Hkv=10)),
    "decode": lambda: all_of(decode_launches, tensors_of(D=128, page=16, Sq=5), causal=True),
    "decode of few rows": lambda: all_of(decode_launches, tensors_of(D=128, page=16), causal=True),
    "spans of decode": lambda: all_of(
        decode_launches, tensors_of(D=64), causal=True, query_invariant=True
    ),
    "backward": lambda: compiled(64, causal=True),
    "wide backward": lambda: compiled_wide("queries", 192, 128, causal=False),
}
TO_LAYOUTS = "--to-layouts"


def leave_out_llvm() -> None:
    """From here on builds end before LLVM's code, and are kept apart from whole ones."""

    def make_ptx(self: object, src: object, metadata: dict[str, object], *_: object) -> str:
        metadata["name"] = "unlowered"
        return ""

    def make_llir(self: object, src: object, metadata: dict[str, object], *_: object) -> str:
        metadata["shared"] = 0
        return ""

    os.environ["TRITON_CACHE_DIR"] = str(Path(triton.knobs.cache.dir) / "unlowered")
    CUDABackend.make_llir, CUDABackend.make_ptx = make_llir, make_ptx
    CUDABackend.make_cubin = lambda *_: b""


if __name__ == "__main__":
    names = sys.argv[1:]
    whole = names[: names.index(TO_LAYOUTS)] if TO_LAYOUTS in names else names
    builds = {name: KERNELS[name]() for name in whole}
    products = {
        name: count([text for _, text in built.instructions])["HGMMA"]
        for name, built in builds.items()
    }
    serialized = [name for name, built in builds.items() if "serialized" in built.report]
    compiled_toy = compile_for_hopper(toy, ARGUMENTS).kernel
    sizes = [parameter.size for parameter in parameters_of(compiled_toy, ARGUMENTS)]
    found = {
        "triton": triton.__version__,
        "products": products,
        "serialized": serialized,
        "parameters": sizes == sizes_in(compiled_toy.asm["ptx"]),
        "barriers": {
            name: max(partition_barriers(built))
            for name, built in builds.items()
            if name == "backward"
        },
    }
    leave_out_llvm()
    for name in names[len(whole) + 1 :]:
        ttgir = KERNELS[name]().kernel.asm["ttgir"]
        products[name] = ttgir.count("ttng.warp_group_dot ") + ttgir.count("tt.dot ")
    print(json.dumps(found))
