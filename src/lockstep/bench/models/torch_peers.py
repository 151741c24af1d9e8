"""PyTorch's own attentions as peers in `lockstep bench gpu --suite models`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from lockstep.bench.contender import Call
from lockstep.bench.models.contender import Contender
from lockstep.bench.models.inputs import Inputs
from lockstep.bench.models.packing import pack, window_of
from lockstep.bench.peers import cudnn_version, first


def find() -> list[Contender]:
    """FA2, cuDNN and the memory-efficient kernel."""
    return [
        Contender("FA2", _fa2),
        Contender("cuDNN", _sdpa("CUDNN_ATTENTION"), version=cudnn_version()),
        Contender("efficient", _sdpa("EFFICIENT_ATTENTION")),
    ]


def _fa2(inputs: Inputs) -> Call:
    case, layer = inputs.case, inputs.case.shape
    _refuse_variants(inputs)
    if layer.value_dim != layer.D:
        raise NotImplementedError("takes one head dim")
    if layer.window is not None or case.packed:
        return _torch_varlen(inputs)
    return _sdpa("FLASH_ATTENTION")(inputs)


def _torch_varlen(inputs: Inputs) -> Call:
    if find_spec("torch.nn.attention.varlen") is None:
        raise NotImplementedError("this torch has no packed attention")
    from torch.nn.attention.varlen import varlen_attn

    packed, layer = pack(inputs), inputs.case.shape
    takes = inspect.signature(varlen_attn).parameters
    how: dict[str, Any] = {"window_size": window_of(inputs, -1), "scale": layer.scale}
    if "window_size" not in takes:
        raise NotImplementedError("the packed attention of this torch has no window")
    if "enable_gqa" in takes:
        how["enable_gqa"] = layer.Hq != layer.Hkv
    args: tuple[Any, ...] = (packed.q, packed.k, packed.v, packed.cu_seqlens_q, packed.cu_seqlens_k)
    args += (packed.max_seqlen_q, packed.max_seqlen_k)
    return lambda: packed.unpack(first(varlen_attn(*args, **how)))


def _sdpa(backend: str) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
        from torch.nn.functional import scaled_dot_product_attention

        case, layer = inputs.case, inputs.case.shape
        _refuse_variants(inputs)
        if layer.window is not None or case.packed:
            raise NotImplementedError("takes neither a window nor packed sequences")
        if layer.Hq != layer.Hkv and backend == "EFFICIENT_ATTENTION":
            raise NotImplementedError("takes no grouped heads")
        how: dict[str, Any] = {"scale": layer.scale}
        if layer.Hq != layer.Hkv:
            how["enable_gqa"] = True
        if layer.causal and case.Sq == case.keys:
            how["is_causal"] = True
        elif layer.causal:
            if backend == "CUDNN_ATTENTION":
                raise NotImplementedError("aligns the mask with the first key")
            how["attn_mask"] = causal_lower_right(case.Sq, case.keys)
        q, k, v = inputs.tensors[:3]

        def run() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(q, k, v, **how)

        _refuse_without_kernel(run)
        return run

    return prepare


def _refuse_variants(inputs: Inputs) -> None:
    layer = inputs.case.shape
    if layer.softcap is not None or layer.sinks or inputs.case.page:
        raise NotImplementedError("takes no softcap, sinks or pages")


def _refuse_without_kernel(run: Call) -> None:
    """Raises NotImplementedError where PyTorch finds that the backend does not take the call."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except RuntimeError as error:
        if "No available kernel" not in str(error):
            raise
        raise NotImplementedError("does not take these sizes") from error
