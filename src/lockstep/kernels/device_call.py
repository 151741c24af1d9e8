"""Prepared calls of GPU kernels: all run with the device of their tensors current."""

from __future__ import annotations

from typing import Any

import torch


class DeviceCall:
    """`_run`, which subclasses have, on `device`; that of tensors on a CPU is -1."""

    __slots__ = ()

    device: int

    def __call__(self, tensors: Any, addresses: list[int]) -> Any:
        if self.device >= 0 and self.device != torch._C._cuda_getDevice():
            with torch.cuda.device(self.device):
                return self._run(tensors, addresses)
        return self._run(tensors, addresses)

    def _run(self, tensors: Any, addresses: list[int]) -> Any:
        raise NotImplementedError
