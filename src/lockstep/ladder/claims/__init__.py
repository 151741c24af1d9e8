"""The claims of five documents on attention kernels, each put to the test.

The documents describe the kernels that became the lower and middle rungs of the ladder. Each figure
in them that can be checked stands here with a way to find out what we get; the verdict is computed:

>>> from lockstep.ladder.claims import CLAIMS
>>> CLAIMS[0].test().verdict
'holds'
"""

from __future__ import annotations

from . import block_parallel, parallel_softmax, parallelisation, split_kv, tree_softmax, warps
from .claim import DEPENDS, DIFFERS, HOLDS, UNMEASURED, Claim, Figure, Finding

CLAIMS: tuple[Claim, ...] = (
    *parallelisation.CLAIMS,
    *tree_softmax.CLAIMS,
    *parallel_softmax.CLAIMS,
    *split_kv.CLAIMS,
    *warps.CLAIMS,
    *block_parallel.CLAIMS,
)

__all__ = ["CLAIMS", "DEPENDS", "DIFFERS", "HOLDS", "UNMEASURED", "Claim", "Figure", "Finding"]
