"""The peers in `lockstep bench gpu`: attention of other libraries.

PyTorch's own attentions always take part, other libraries if they can be imported. A script can add
more, see `benchmarks/gpu_h200.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib import metadata
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lockstep.bench.contender import Call, Contender, Decode, Prefill, Varlen

if TYPE_CHECKING:
    from torch import Tensor


def find() -> list[Contender]:
    """The peers that this machine has."""
    found = [
        Contender("FA2", _sdpa("FLASH_ATTENTION"), backward=True, varlen=_torch_varlen()),
        Contender("cuDNN", _sdpa("CUDNN_ATTENTION"), backward=True, version=cudnn_version()),
        Contender("flex", _flex),
    ]
    if find_spec("flash_attn_interface") is not None:
        version = version_of("flash-attn-3", "flash_attn_3")
        found.append(
            Contender("FA3", _fa3, True, _fa3_decode(0), tokens_first=True, version=version)
        )
        found.append(Contender("FA3 one split", decode=_fa3_decode(1)))
    if find_spec("flash_attn") is not None and find_spec("flash_attn.cute") is not None:
        found.append(fa4())
    if find_spec("flashinfer") is not None:
        found.append(
            Contender(
                "flashinfer", decode=_flashinfer_decode, version=version_of("flashinfer-python")
            )
        )
    return found


def cudnn_version() -> str:
    """The version of cuDNN, "" where torch has none."""
    import torch

    number: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    if number is None:
        return ""
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def version_of(*distributions: str) -> str:
    """The version of the first distribution that is installed, "" where none is."""
    for name in distributions:
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return ""


def _sdpa(backend: str) -> Prefill:
    def prepare(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.functional import scaled_dot_product_attention

        grouped = q.shape[1] != k.shape[1]

        def run() -> Tensor:
            with sdpa_kernel(getattr(SDPBackend, backend)):
                return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

        return run

    return prepare


def _flex(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    flex = _compiled_flex()
    mask = _causal_mask(q.shape[2], k.shape[2]) if causal else None
    grouped = q.shape[1] != k.shape[1]
    return lambda: flex(q, k, v, block_mask=mask, enable_gqa=grouped)


@lru_cache
def _compiled_flex() -> Callable[..., Any]:
    """flex_attention, compiled for each shape it meets.

    Beyond a number of shapes, torch.compile would run it uncompiled without a word, and slowly.
    """
    import torch
    from torch._dynamo import config
    from torch.nn.attention.flex_attention import flex_attention

    config.recompile_limit = 1000
    config.fail_on_recompile_limit_hit = True
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

    def prepare(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool
    ) -> Call:
        import inspect

        from torch.nn.attention.varlen import varlen_attn

        # Torch 2.11 replaced is_causal by a window.
        takes_causal = "is_causal" in inspect.signature(varlen_attn).parameters
        how: dict[str, Any] = {"window_size": (-1, 0 if causal else -1)}
        if takes_causal:
            how = {"is_causal": causal}
        args: Any = (q, k, v, cu_seqlens, cu_seqlens, longest, longest)
        return lambda: first(varlen_attn(*args, **how))

    return prepare


def first(result: Any) -> Any:
    """The output alone, where a library returns more than that."""
    return result[0] if isinstance(result, tuple) else result


def _fa3(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    from flash_attn_interface import flash_attn_func

    tokens = [x.transpose(1, 2) for x in (q, k, v)]  # [B, S, H, D]
    return lambda: first(flash_attn_func(*tokens, causal=causal)).transpose(1, 2)


def _fa3_decode(num_splits: int) -> Decode:
    """FA3 on a paged cache; with `num_splits` 0 it chooses how far to split the keys."""

    def prepare(
        q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Call:
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
            return first(out).transpose(1, 2)  # type: ignore[no-any-return]

        return run

    return prepare


def fa4() -> Contender:
    """FlashAttention-4, which has to be importable as `flash_attn.cute`."""
    version = version_of("flash-attn-4")
    return Contender(
        "FA4", _fa4, backward=True, varlen=_fa4_varlen, tokens_first=True, version=version
    )


def _fa4(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call:
    from flash_attn.cute import flash_attn_func

    tokens = [x.transpose(1, 2) for x in (q, k, v)]  # [B, S, H, D]
    return lambda: first(flash_attn_func(*tokens, causal=causal)).transpose(1, 2)


def _fa4_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, longest: int, causal: bool
) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    return lambda: first(
        flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens,
            max_seqlen_q=longest,
            max_seqlen_k=longest,
            causal=causal,
        )
    )


def _flashinfer_decode(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, kv_lens: Tensor
) -> Call:
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
