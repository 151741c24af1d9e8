"""Which method runs, and what is said of those that do not."""

from __future__ import annotations

import pytest

from lockstep.distributed.methods import Sizes, choose, find

EVEN = Sizes(Hq=8, Hkv=4, ranks=4, kernel="triton", carrying="triton", query_invariant=True)
# As on a Hopper GPU: a plain call is not run by the kernel that takes keys in blocks.
OTHER_BITS = EVEN._replace(kernel="hopper")


def test_the_rule_goes_by_key_heads():
    assert choose(EVEN).method == "heads"
    assert choose(EVEN._replace(ranks=3)).method == "gather"
    assert "do not divide evenly among 3 ranks" in choose(EVEN._replace(ranks=3)).reasons["heads"]


def test_a_ring_with_other_bits_than_a_plain_call_is_refused():
    assert find("ring", EVEN).name == "ring"
    with pytest.raises(NotImplementedError, match="pass kernel='triton' to both"):
        find("ring", OTHER_BITS)
    assert "plain call, which hopper computes here" in str(choose(OTHER_BITS))
    assert find("ring", OTHER_BITS._replace(query_invariant=False)).name == "ring"


def test_a_ring_without_a_kernel_for_it_is_refused():
    with pytest.raises(NotImplementedError, match="keys in blocks, which oracle does not"):
        find("ring", EVEN._replace(kernel="oracle", carrying=None))
