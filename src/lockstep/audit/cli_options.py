"""Options that several commands of `lockstep audit` take. torch is imported inside."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from lockstep.output.formats import DTYPES

if TYPE_CHECKING:
    import torch


def check_device(device: str, *, indexed: bool = True, needed: bool = True) -> None:
    """Raises ValueError for a device that is no CPU or CUDA device, or not here if it is `needed`;
    unless `indexed`, for one with an index as well."""
    import torch

    kind, _, index = device.partition(":")
    takes_index = indexed and kind == "cuda" and index.isdecimal()
    if kind not in ("cpu", "cuda") or (index and not takes_index):
        choice = "cpu, cuda or cuda:N" if indexed else "cpu or cuda"
        raise ValueError(f"--device takes {choice}, got {device!r}")
    if needed and kind == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a CUDA device and a torch built for it: none is here")
    if index and int(index) >= torch.cuda.device_count():
        raise ValueError(
            f"--device takes cuda:0 to cuda:{torch.cuda.device_count() - 1} here, got {device!r}"
        )


def dtype_of(name: str, takes: Iterable[str] = DTYPES) -> torch.dtype:
    """The dtype that `--dtype` names. Raises ValueError for another name."""
    import torch

    if name not in takes:
        raise ValueError(f"--dtype takes one of {', '.join(takes)}, got {name!r}")
    dtype: torch.dtype = getattr(torch, DTYPES[name])
    return dtype
