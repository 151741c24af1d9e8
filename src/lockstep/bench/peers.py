"""What else computes attention on this GPU: the peers in the tables of `lockstep bench gpu`.

PyTorch's own are always there; others if they can be imported. A script can add more, see
`benchmarks/gpu_h200.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

Prefill = Callable[["Tensor", "Tensor", "Tensor", bool], "Tensor"]
Decode = Callable[["Tensor", "Tensor", "Tensor", "Tensor", "Tensor"], Callable[[], "Tensor"]]
Varlen = Callable[["Tensor", "Tensor", "Tensor", "Tensor", int, bool], "Tensor"]


@dataclass(frozen=True)
class Peer:
    """A library by what it can do; None for what it cannot.

    prefill: (q, k, v [B, H, S, D], causal) -> out, differentiable if `backward`.
    decode: (q [B, Hq, 1, D], k_pages, v_pages [n_pages, page, Hkv, D], page_table [B, pages],
        kv_lens [B]) -> a call without arguments that does the work and returns [B, Hq, 1, D].
    varlen: (q, k, v [T, H, D], cu_seqlens [B + 1] int32, longest, causal) -> out [T, H, D].
    """

    name: str
    prefill: Prefill | None = None
    backward: bool = False
    decode: Decode | None = None
    varlen: Varlen | None = None


def find() -> list[Peer]:
    """The peers that this machine has."""
    found = [
        Peer("FA2", _sdpa("FLASH_ATTENTION"), backward=True, varlen=_torch_varlen()),
        Peer("cuDNN", _sdpa("CUDNN_ATTENTION"), backward=True),
        Peer("flex", _flex, backward=True),
    ]
    if find_spec("flash_attn_interface") is not None:
        found.append(Peer("FA3", _fa3, True, _fa3_decode(0)))
        found.append(Peer("FA3 one split", decode=_fa3_decode(1)))
    if find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None:
        found.append(Peer("FA4", _fa4, backward=True))
    if find_spec("flashinfer") is not None:
        found.append(Peer("flashinfer", decode=_flashinfer_decode))
    return found


def _sdpa(backend: str) -> Prefill:
    def run(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        with sdpa_kernel(getattr(SDPBackend, backend)):
            return scaled_dot_product_attention(
                q, k, v, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
            )

    return run


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    mask = _causal_mask(q.shape[2], k.shape[2]) if causal else None
    out: Tensor = _compiled_flex()(q, k, v, block_mask=mask, enable_gqa=q.shape[1] != k.shape[1])
    return out


@lru_cache
def _compiled_flex() -> Callable[..., Any]:
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


@lru_cache
def _causal_mask(Sq: int, Skv: int) -> Any:
    from torch.nn.attention.flex_attention import create_block_mask

    def below_diagonal(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return q_idx >= kv_idx

    return create_block_mask(below_diagonal, None, None, Sq, Skv, device="cuda")


def _torch_varlen() -> Varlen | None:
    if find_spec("torch.nn.attention.varlen") is None:
        return None

    def run(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool
    ) -> Tensor:
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        # Torch 2.11 replaced is_causal by a window.
        takes_causal = "is_causal" in inspect.signature(varlen_attn).parameters
        how: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)}
        if takes_causal:
            how = {"is_causal": causal}
        args: Any = (q, k, v, cu_seqlens, cu_seqlens, longest, longest)
        return _first(varlen_attn(*args, **how))  # type: ignore[no-any-return]

    return run


def _first(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from flash_attn_interface import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return _first(out).transpose(1, 2)  # type: ignore[no-any-return]


def _fa3_decode(num_splits: int) -> Decode:
    """`num_splits` 0 lets FA3 choose."""

    def prepare(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Callable[[], Tensor]:
        from flash_attn_interface import flash_attn_with_kvcache

        tokens = q.transpose(1, 2)  # [B, 1, Hq, D]

        def run() -> Tensor:
            out = flash_attn_with_kvcache(
                tokens,
                k_pages,
                v_pages,
                cache_seqlens=kv_lens,
                page_table=page_table,
                causal=True,
                num_splits=num_splits,
            )
            return _first(out).transpose(1, 2)  # type: ignore[no-any-return]

        return run

    return prepare


def _fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    from flash_attn.cute import flash_attn_func

    out = flash_attn_func(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal)
    return _first(out).transpose(1, 2)  # type: ignore[no-any-return]


def _flashinfer_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor
) -> Callable[[], Tensor]:
    import flashinfer
    import torch

    B, Hq, _, D = q.shape
    page, Hkv = k_pages.shape[1:3]
    used = (kv_lens + page - 1) // page
    starts = torch.zeros(B + 1, dtype=torch.int32, device=q.device)
    starts[1:] = used.cumsum(0)
    pages = torch.cat([page_table[b, : int(used[b])] for b in range(B)])
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device=q.device)
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD")
    last = kv_lens - (used - 1) * page
    wrapper.plan(starts, pages, last.int(), Hq, Hkv, D, page, q_data_type=q.dtype)
    tokens = q[:, :, 0].contiguous()  # [B, Hq, D]
    return lambda: wrapper.run(tokens, (k_pages, v_pages))[:, :, None]
