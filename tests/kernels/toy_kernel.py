"""A kernel that does nothing, with an argument of each kind."""

from __future__ import annotations

import torch

from lockstep.kernels.hopper.common.gluon_shim import TensorDescriptor, gl, gluon


@gluon.jit
def toy(x_desc, y_ptr, z_ptr, number, real, CONSTANT: gl.constexpr):
    pass


_BLOCK = [64, 64]
_LAYOUT = gl.NVMMASharedLayout.get_default_for(_BLOCK, gl.float32)
ARGUMENTS = (
    TensorDescriptor(torch.zeros(64, 64), [64, 64], [64, 1], _BLOCK, _LAYOUT),
    torch.zeros(1),
    None,
    7,
    0.25,
    3,
)
