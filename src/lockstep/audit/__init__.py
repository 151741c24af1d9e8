"""Audits: each claim in a kernel's descriptor, tested on this machine and these shapes.

`lockstep.audit.model(model, inputs)` does the like for a whole model: see `model_bits`.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Commands import this package, and should not have to wait for torch.
    if name == "model":
        from lockstep.audit.model_bits import model

        return model
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
