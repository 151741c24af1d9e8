"""Lockstep as an attention backend of vLLM.

    vllm serve MODEL --attention-backend CUSTOM

vLLM finds `register` by the entry point `vllm.general_plugins` wherever Lockstep is installed; the
backend then runs where CUSTOM is asked for. It is written for the interface of vLLM's sources of
August 2026 (commit a014e35): keys and values of a layer are one tensor, logically
[blocks, Hkv, block, 2 · D], with a key's values after it, and new ones are written before
attention is called.

The classes below do not derive from vLLM's, so that this module can be imported without vLLM.
`LockstepBackend`, which vLLM imports by its name, is made of both on first use.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.api import attention_varlen

CLASS = "LockstepBackend"
MAX_HEAD_DIM = 512
# The largest float32 tiles that fit the shared memory of every GPU from sm_80 on.
MAX_FLOAT32_HEAD_DIM = 256


def register() -> None:
    """Make `--attention-backend CUSTOM` of vLLM run Lockstep. Nothing changes for other backends.

    Raises:
        ImportError: vLLM is not installed.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{CLASS}")


class Metadata(NamedTuple):
    """What all layers of one step share. The tensors are vLLM's own, which CUDA graphs reuse."""

    tokens: int
    query_start_loc: Tensor  # [B + 1]
    seq_lens: Tensor  # [B]
    block_table: Tensor  # [B, max_blocks]
    causal: bool
    max_query_len: int


class Builder:
    """Makes the metadata of a step: on the host, without looking at the device."""

    def build(self, common_prefix_len: int, common: Any, fast_build: bool = False) -> Metadata:
        if isinstance(common.causal, Tensor):
            raise NotImplementedError("Lockstep has no causal mask for some requests of a batch")
        return Metadata(
            common.num_actual_tokens,
            common.query_start_loc,
            common.seq_lens,
            common.block_table_tensor,
            common.causal,
            # Of a batch that a graph is captured with: the most of any that it is replayed for.
            common.max_query_len,
        )


class Implementation:
    """The attention of one layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = "decoder",
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        from vllm import envs

        for name, value in others.items():
            if value is not None and value is not False:
                raise NotImplementedError(f"Lockstep's backend for vLLM has no {name}={value!r}")
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads or num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.window = None if sliding_window is None else (sliding_window - 1, 0)
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = logits_soft_cap or None
        self.attn_type = attn_type
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self.slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes)
        # Chunks of a prompt are cut by the load, so invariance to the batch includes them.
        self.query_invariant = bool(envs.VLLM_BATCH_INVARIANT)

    def _pages(self, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [blocks, block, Hkv, D] each, without a copy."""
        pages = kv_cache.transpose(1, 2)
        return pages[..., : self.head_size], pages[..., self.head_size :]

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Writes new keys and values [tokens, Hkv, D] to their slots, by vLLM's own kernel."""
        from vllm._custom_ops import reshape_and_cache_flash

        reshape_and_cache_flash(
            key,
            value,
            *self._pages(kv_cache),
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of query [tokens, Hq, D] into output [tokens, Hq, D], which is returned."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("Lockstep's backend for vLLM has no quantised output")
        if attn_metadata is None:
            # vLLM measures memory.
            return output.zero_()
        if self.slopes is not None and self.slopes.device != query.device:
            self.slopes = self.slopes.to(query.device)
        n = attn_metadata.tokens
        out = attention_varlen(
            query[:n],
            *self._pages(kv_cache),
            attn_metadata.query_start_loc,
            page_table=attn_metadata.block_table,
            kv_lens=attn_metadata.seq_lens,
            causal=attn_metadata.causal,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self.slopes,
            max_seqlen_q=attn_metadata.max_query_len,
            query_invariant=self.query_invariant,
        )
        output[:n].copy_(out)
        return output


class Backend:
    """What Lockstep runs, as vLLM asks for it."""

    supported_dtypes = (torch.float16, torch.bfloat16, torch.float32)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's list of backends."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type:
        return _derived()["LockstepImplementation"]

    @staticmethod
    def get_builder_cls() -> type:
        return _derived()["LockstepBuilder"]

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[Any]:
        """Pages of any size."""
        from vllm.v1.attention.backend import MultipleOf

        return [MultipleOf(1)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size <= MAX_HEAD_DIM

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, *others: Any, **more: Any
    ) -> str | None:
        if dtype == torch.float32 and head_size > MAX_FLOAT32_HEAD_DIM:
            return f"float32 has head sizes up to {MAX_FLOAT32_HEAD_DIM}"
        return None

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True


@cache
def _derived() -> dict[str, type]:
    """The classes above with vLLM's as their bases."""
    from vllm.v1.attention import backend as theirs

    def derive(name: str, ours: type, base: type, **attributes: Any) -> type:
        return type(name, (ours, base), {"__module__": __name__, **attributes})

    graphs = {"_cudagraph_support": theirs.AttentionCGSupport.ALWAYS}
    return {
        CLASS: derive(CLASS, Backend, theirs.AttentionBackend),
        "LockstepBuilder": derive(
            "LockstepBuilder", Builder, theirs.AttentionMetadataBuilder, **graphs
        ),
        "LockstepImplementation": derive(
            "LockstepImplementation", Implementation, theirs.AttentionImpl
        ),
    }


def __getattr__(name: str) -> Any:
    if name == CLASS:
        return _derived()[CLASS]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
