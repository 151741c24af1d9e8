"""The script `lockstep`, which Ctrl-C ends with one line and status 130 from the start.

The package `lockstep` imports PyTorch, which takes seconds. So this module is not part of it.
"""

from __future__ import annotations

import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """What the script calls."""
    usual = signal.getsignal(signal.SIGINT)
    # A process in the background may ignore Ctrl-C, and goes on to.
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    from lockstep.cli import command_line

    signal.signal(signal.SIGINT, usual)
    command_line()


def _end(*_: object) -> NoReturn:
    # An exception could be caught by a module that is being imported.
    os.write(2, b"interrupted\n")
    os._exit(130)
