"""Whether this process was forked after Lockstep was imported. Costs nothing to import."""

from __future__ import annotations

import os

forked = False


def _note_fork() -> None:
    global forked
    forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
