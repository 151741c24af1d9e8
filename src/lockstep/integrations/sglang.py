"""Lockstep as an attention backend of SGLang.

    python -m sglang.launch_server --model-path MODEL --attention-backend lockstep

SGLang finds `register` by the entry point `sglang.srt.plugins` wherever Lockstep is installed; the
backend runs where it is asked for. It is written for the interface of SGLang's sources of August
2026 (commit cce0a12): a table has the slot of every token of every request, and a page is a number
of slots side by side.

The class below does not derive from SGLang's, so that this module can be imported without SGLang.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.api import attention_varlen

NAME = "lockstep"


def register() -> None:
    """Make `--attention-backend lockstep` known to SGLang, for deterministic inference as well.

    Raises:
        ImportError: SGLang is not installed.
    """
    from sglang.srt import server_args
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    if NAME not in server_args.ATTENTION_BACKEND_CHOICES:
        server_args.add_attention_backend_choices([NAME])
        server_args.add_deterministic_attention_backend_choices([NAME])
        server_args.add_radix_supported_deterministic_attention_backend_choices([NAME])
    derived = type("LockstepBackend", (Backend, AttentionBackend), {"__module__": __name__})
    register_attention_backend(NAME)(derived)


class Metadata(NamedTuple):
    """Lengths, offsets and pages of one step, which all layers share."""

    cu_seqlens_q: Tensor  # [B + 1] int32
    kv_lens: Tensor  # [B] int32
    page_table: Tensor  # [B, max_pages] int32
    max_seqlen_q: int | None  # where a graph that records the step has it in every replay


class Backend:
    """Attention of requests to their keys in the pool."""

    # Nothing here reads lengths on the host.
    needs_cpu_seq_lens = False

    def __init__(self, runner: Any) -> None:
        super().__init__()
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        if runner.use_mla_backend:
            raise ValueError("the attention backend lockstep has no multi-head latent attention")
        if isinstance(runner.token_to_kv_pool, SWAKVPool):
            raise ValueError(
                "the attention backend lockstep keeps all keys of sliding windows: start SGLang "
                "with --disable-hybrid-swa-memory"
            )
        self.pool = runner.token_to_kv_pool
        self.slots = runner.req_to_token_pool.req_to_token  # [requests, max_tokens]
        self.page = runner.page_size
        # The first token of each page.
        self.firsts = torch.arange(
            0, runner.model_config.context_len, self.page, device=self.slots.device
        )
        self.query_invariant = bool(runner.server_args.enable_deterministic_inference)
        self.metadata: Metadata | None = None

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Offsets, lengths and pages of a step, by operations that a CUDA graph records."""
        mode, seq_lens = forward_batch.forward_mode, forward_batch.seq_lens
        if mode.is_target_verify() or mode.is_draft_extend_v2():
            raise NotImplementedError("the attention backend lockstep has no speculative decoding")
        B = seq_lens.shape[0]
        if mode.is_decode_or_idle():
            offsets = torch.arange(B + 1, dtype=torch.int32, device=seq_lens.device)
            longest = 1
        else:
            longest = None
            offsets = torch.zeros(B + 1, dtype=torch.int32, device=seq_lens.device)
            torch.cumsum(forward_batch.extend_seq_lens, 0, out=offsets[1:])
        requests = forward_batch.req_pool_indices[:, None]
        pages = self.slots[requests, self.firsts] // self.page
        self.metadata = Metadata(offsets, seq_lens.int(), pages.int(), longest)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Graphs need no state: what they record makes its own."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """How many keys a request has that fills up the batch of a graph."""
        return 1

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> Tensor:
        """Attention of q [tokens, Hq · D] after its keys and values have gone to the pool.

        Returns:
            out [tokens, Hq · Dv]

        Raises:
            NotImplementedError: The layer or an argument asks for something else.
        """
        _refuse(layer, others)
        assert self.metadata is not None, "init_forward_metadata comes first"
        if save_kv_cache and k is not None and v is not None:
            from sglang.srt.mem_cache.memory_pool import KVWriteLoc

            self.pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc), k, v)
        keys = self.pool.get_key_buffer(layer.layer_id)
        values = self.pool.get_value_buffer(layer.layer_id)
        if keys.dtype != q.dtype:
            raise NotImplementedError(
                f"the attention backend lockstep has no cache of {keys.dtype} for {q.dtype}"
            )
        # SGLang's window does not count the query's own key.
        causal = layer.attn_type.value == "decoder"
        window = layer.sliding_window_size if causal else None
        out = attention_varlen(
            q.view(-1, layer.tp_q_head_num, layer.qk_head_dim),
            keys.view(-1, self.page, layer.tp_k_head_num, layer.qk_head_dim),
            values.view(-1, self.page, layer.tp_v_head_num, layer.v_head_dim),
            self.metadata.cu_seqlens_q,
            page_table=self.metadata.page_table,
            kv_lens=self.metadata.kv_lens,
            causal=causal,
            window=None if window is None or window < 0 else (window, 0),
            scale=layer.scaling,
            softcap=layer.logit_cap or None,
            sinks=sinks,
            max_seqlen_q=self.metadata.max_seqlen_q,
            query_invariant=self.query_invariant,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)

    forward_extend = forward_decode
    forward_mixed = forward_decode


def _refuse(layer: Any, others: dict[str, Any]) -> None:
    if layer.is_cross_attention or layer.attn_type.value == "decoder_bidirectional":
        raise NotImplementedError(
            "the attention backend lockstep has no cross attention and no bidirectional decoders"
        )
    for name, value in others.items():
        if value is not None and value is not False:
            raise NotImplementedError(f"the attention backend lockstep has no {name}={value!r}")
