"""Whether the test of barriers finds one whose memory is that of a tile."""

from __future__ import annotations

import pytest

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from hopper_build import unused_barriers
from shared_places import shared_with_barriers

KERNEL = """
#numbers = #ttg.blocked<{{sizePerThread = [1, 1], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1], order = [1, 0]}}>
#flat = #ttg.swizzled_shared<{{vec = 1, perPhase = 1, maxPhase = 1, order = [1, 0]}}>
#flat1 = #ttg.swizzled_shared<{{vec = 1, perPhase = 1, maxPhase = 1, order = [0]}}>
module attributes {{"ttg.num-ctas" = 1 : i32, "ttg.num-warps" = 4 : i32, ttg.target = "cuda:90", "ttg.threads-per-warp" = 32 : i32}} {{
  tt.func public @toy(%x: tensor<4x32xf32, #numbers>) {{
    %zero = arith.constant 0 : i32
    %true = arith.constant true
    %bars = ttg.local_alloc : () -> !ttg.memdesc<1x1xi64, #flat1, #ttg.shared_memory, mutable>
    %bar = ttg.memdesc_index %bars[%zero] : !ttg.memdesc<1x1xi64, #flat1, #ttg.shared_memory, mutable> -> !ttg.memdesc<1xi64, #flat1, #ttg.shared_memory, mutable>
    ttng.init_barrier %bar, 1 : !ttg.memdesc<1xi64, #flat1, #ttg.shared_memory, mutable>
    {before}
    %tile = ttg.local_alloc : () -> !ttg.memdesc<4x32xf32, #flat, #ttg.shared_memory, mutable>
    ttg.local_store %x, %tile : tensor<4x32xf32, #numbers> -> !ttg.memdesc<4x32xf32, #flat, #ttg.shared_memory, mutable>
    %y = ttg.local_load %tile : !ttg.memdesc<4x32xf32, #flat, #ttg.shared_memory, mutable> -> tensor<4x32xf32, #numbers>
    {behind}
    tt.return
  }}
}}
"""  # noqa: E501
WAIT = "ttng.wait_barrier %bar, %zero : !ttg.memdesc<1xi64, #flat1, #ttg.shared_memory, mutable>"


@pytest.mark.parametrize(
    ("before", "behind", "is_unused", "is_shared"),
    [("", "", True, True), (WAIT, "", False, True), ("", WAIT, False, False)],
    ids=["without use", "done before the tile", "in use behind it"],
)
def test_barriers_that_share_their_memory_are_found(before, behind, is_unused, is_shared):
    ttgir = KERNEL.format(before=before, behind=behind)
    assert bool(unused_barriers(ttgir)) == is_unused
    assert bool(shared_with_barriers(ttgir)) == is_shared
