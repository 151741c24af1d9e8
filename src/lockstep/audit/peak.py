"""How much memory a call takes at its peak, beyond what was there before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

_PROCESS = Path("/proc/self")


def peak(call: Callable[[], object], device: torch.device) -> int | None:
    """Bytes at the peak of a call; None where the system does not tell.

    On a CPU these are the resident pages of the process, so a few MiB either way say nothing.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    try:
        # 5 resets the peak; see proc(5).
        (_PROCESS / "clear_refs").write_text("5")
        before = _resident("VmRSS")
        call()
        return _resident("VmHWM") - before
    except OSError:
        return None


def _resident(field: str) -> int:
    for line in (_PROCESS / "status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"no {field} in {_PROCESS / 'status'}")
