"""How numba compiles this package: no interpreter lock, no exceptions, kept on disk.

numba's own cache looks only at the file a kernel stands in; ours spread over several files, so
the cache is keyed by all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from numba import njit

compiled = njit(nogil=True, error_model="numpy")
"""For parts of a kernel: compiled with the kernel that calls them."""


@lru_cache(maxsize=1)
def _fingerprint() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def kernel(function: Callable[..., Any]) -> Any:
    """For what Python calls: compiled on first use, then loaded from disk."""
    dispatcher = compiled(function)
    dispatcher.enable_caching()
    dispatcher._cache._cache_file._source_stamp = _fingerprint()
    return dispatcher
