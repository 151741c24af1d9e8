"""Compiles one forward and one backward kernel of the Hopper path, and says with which Triton.

For `test_hopper_versions.py`, which runs it with other versions of Triton first in the path.
"""

from __future__ import annotations

import json

import triton
from hopper_build import count
from test_hopper_backward_build import compiled
from test_hopper_build import build

if __name__ == "__main__":
    builds = {
        "forward": build(128, options={"causal": True}.items()),
        "backward": compiled(64, causal=True),
    }
    products = {
        name: count([text for _, text in built.instructions])["HGMMA"]
        for name, built in builds.items()
    }
    serialized = [name for name, built in builds.items() if "serialized" in built.report]
    found = {"triton": triton.__version__, "products": products, "serialized": serialized}
    print(json.dumps(found))
