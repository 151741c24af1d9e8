"""Autocast: it changes the dtype of a call's floating-point tensors, nothing else.

Integers, complex numbers and masks stay what they are, so a call under autocast meets the checks
that it meets without.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.amp import is_autocast_available

from lockstep.forks import fork_safe
from lockstep.problem import Tensors

# The dtypes that are cast, as for scaled_dot_product_attention: not float64. A bias, sinks and
# slopes in float32 go with every dtype of q, so they keep their bits.
_QKV_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_BIAS_DTYPES = (torch.float16, torch.bfloat16)

is_any_enabled = torch._C._is_any_autocast_enabled


@fork_safe
def cast(tensors: Tensors) -> Tensors:
    """The tensors that a call runs with; the same ones where autocast is off for their device."""
    if not is_any_enabled():
        return tensors
    device_type = tensors.q.device.type
    if not (is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return tensors
    to = torch.get_autocast_dtype(device_type)
    return tensors._replace(
        q=_cast(tensors.q, _QKV_DTYPES, to),
        k=_cast(tensors.k, _QKV_DTYPES, to),
        v=_cast(tensors.v, _QKV_DTYPES, to),
        bias=_cast(tensors.bias, _BIAS_DTYPES, to),
        sinks=_cast(tensors.sinks, _BIAS_DTYPES, to),
        alibi_slopes=_cast(tensors.alibi_slopes, _BIAS_DTYPES, to),
    )


def _cast(x: Any, dtypes: tuple[torch.dtype, ...], to: torch.dtype) -> Any:
    """A tensor of one of `dtypes` in the dtype `to`; anything else, None included, as it is."""
    return x.to(to) if x is not None and x.dtype in dtypes else x
