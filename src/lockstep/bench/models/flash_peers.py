"""FlashAttention-3 and -4 as peers in `lockstep bench gpu --suite models`.

FA3 is the operator `_vllm_fa3_C::fwd` that vLLM ships: load its library, and `fa3()` has it. FA4 is
`flash_attn.cute`.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from lockstep.bench.contender import Call
from lockstep.bench.models.contender import Contender
from lockstep.bench.models.inputs import Inputs
from lockstep.bench.models.packing import Packed, pack, window_of
from lockstep.bench.peers import version_of


def find() -> list[Contender]:
    """The contenders that this process has loaded, or can import."""
    found = fa3() if hasattr(torch.ops._vllm_fa3_C, "fwd") else []
    if find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None:
        found.append(fa4())
    return found


def fa3() -> list[Contender]:
    """FA3 with the splits that it chooses; planned once for many calls, as servers do; in one
    split. The last two take part where there is a cache."""
    return [
        Contender("FA3", partial(_fa3, num_splits=0), backward=False, version="of vLLM"),
        Contender("FA3 planned", partial(_fa3, num_splits=0, planned=True), backward=False),
        Contender("FA3 one split", partial(_fa3, num_splits=1), backward=False),
    ]


def _fa3(inputs: Inputs, num_splits: int, planned: bool = False) -> Call:
    packed, layer = pack(inputs), inputs.case.shape
    if not inputs.case.page:
        if planned or num_splits:
            raise NotImplementedError("takes part where there is a cache")
        # Keys of a prefill are not split.
        num_splits = 1
    scale = layer.D**-0.5 if layer.scale is None else layer.scale
    plan = _fa3_plan(inputs, packed) if planned else None
    # The operator takes its arguments by position; most are features not wanted here.
    lengths = [packed.cu_seqlens_q, packed.cu_seqlens_k, None, None, packed.seqused_k]
    longest = [packed.max_seqlen_q, packed.max_seqlen_k]
    how: list[Any] = [scale, layer.causal, *_fa3_window(inputs), layer.softcap or 0.0]
    schedule = [True, plan, num_splits, None, 0, inputs.tensors.sinks, 1, 0, None]
    arguments = [packed.q, packed.k, packed.v, *[None] * 4, *lengths, *longest]
    arguments += [packed.page_table, *[None] * 8, *how, *schedule]
    return lambda: packed.unpack(torch.ops._vllm_fa3_C.fwd(*arguments)[0])


def _fa3_plan(inputs: Inputs, packed: Packed) -> Tensor:
    case, layer = inputs.case, inputs.case.shape
    plan: Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(
        case.B,
        packed.max_seqlen_q,
        packed.max_seqlen_k,
        layer.Hq,
        layer.Hkv,
        layer.D,
        layer.value_dim,
        packed.q.dtype,
        packed.seqused_k,
        packed.cu_seqlens_q,
        None,
        None,
        None,
        None,
        case.page,
        0,
        layer.causal,
        *_fa3_window(inputs),
        layer.softcap is not None,
        0,
        None,
        0,
    )
    return plan


def _fa3_window(inputs: Inputs) -> tuple[int | None, int | None]:
    return (-1, -1) if inputs.case.shape.window is None else window_of(inputs, -1)


def fa4() -> Contender:
    """FlashAttention-4, which has to be importable as `flash_attn.cute`."""
    return Contender("FA4", _fa4, version=version_of("flash-attn-4"))


def _fa4(inputs: Inputs) -> Call:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    t, layer = inputs.tensors, inputs.case.shape
    if inputs.case.page:
        raise NotImplementedError("does not split keys on this GPU")
    how = {
        "softmax_scale": layer.scale,
        "causal": layer.causal,
        "window_size": window_of(inputs, None) if layer.window is not None else (None, None),
        "learnable_sink": t.sinks,
        "softcap": layer.softcap or 0.0,
    }
    if not inputs.case.packed:
        tokens = [x.transpose(1, 2) for x in (t.q, t.k, t.v)]  # [B, S, H, D]
        return lambda: flash_attn_func(*tokens, **how)[0].transpose(1, 2)
    packed = pack(inputs)
    for name in ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"):
        how[name] = getattr(packed, name)
    return lambda: flash_attn_varlen_func(packed.q, packed.k, packed.v, **how)[0]
