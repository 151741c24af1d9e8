"""Compiles kernels of the Hopper path, those that its arguments name, and says with which Triton;
and whether launches know the parameters of a kernel that it compiles.

For `test_hopper_versions.py`, which runs it with other versions of Triton first in the path.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import triton

# This is no test, so nothing has put the helpers of all tests into the path.
sys.path.insert(0, str(Path(__file__).parents[1]))

from hopper_build import compile_for_hopper, count
from test_driver import sizes_in
from test_hopper_backward_build import compiled, partition_barriers
from test_hopper_backward_wide import compiled as compiled_wide
from test_hopper_build import build
from toy_kernel import ARGUMENTS, toy

from lockstep.kernels.driver import parameters_of

KERNELS = {
    "forward": lambda: build(128, options={"causal": True}.items()),
    "backward": lambda: compiled(64, causal=True),
    "wide backward": lambda: compiled_wide("queries", 192, 128, causal=False),
}

if __name__ == "__main__":
    builds = {name: KERNELS[name]() for name in sys.argv[1:]}
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
    print(json.dumps(found))
