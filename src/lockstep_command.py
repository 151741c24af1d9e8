"""The script `lockstep`, which Ctrl-C ends with one line and status 130 from the start.

The package `lockstep` imports PyTorch, which takes seconds. So this module is not part of it. What
is imported stays: collecting garbage meanwhile would take a quarter of a second, and find none.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import NoReturn


def main() -> NoReturn:
    """The entry point of the script."""
    usual = signal.getsignal(signal.SIGINT)
    # A process in the background may ignore Ctrl-C, and goes on to.
    if usual is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)
    gc.disable()
    from lockstep.cli import command_line

    gc.freeze()
    gc.enable()
    signal.signal(signal.SIGINT, usual)
    command_line()


def _end(*_: object) -> NoReturn:
    # An exception could be caught by a module that is being imported.
    os.write(2, b"interrupted\n")
    os._exit(130)
