"""What autocast does to a call: it changes the dtype of its floating-point tensors, nothing else.

Integers, complex numbers and masks stay what they are, so a call under autocast meets the checks
that it meets without.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.amp import is_autocast_available

from lockstep.problem import Tensors

# As for scaled_dot_product_attention: not float64. A float32 bias and float32 sinks go with every
# dtype of q, so they keep their bits.
_OF_QKV = (torch.float16, torch.bfloat16, torch.float32)
_OF_EXTRAS = (torch.float16, torch.bfloat16)

is_any_enabled = torch._C._is_any_autocast_enabled


def cast(tensors: Tensors) -> Tensors:
    """The tensors that a call runs with; the same ones where autocast is off for their device."""
    if not is_any_enabled():
        return tensors
    device_type = tensors.q.device.type
    if not (is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return tensors
    to = torch.get_autocast_dtype(device_type)
    q, k, v = (_cast(x, _OF_QKV, to) for x in tensors[:3])
    bias, sinks = (x if x is None else _cast(x, _OF_EXTRAS, to) for x in tensors[3:5])
    return tensors._replace(q=q, k=k, v=v, bias=bias, sinks=sinks)


def _cast(x: Tensor, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> Tensor:
    return x.to(to) if x.dtype in dtypes else x
