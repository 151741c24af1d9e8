"""Stand-ins for the parts of vLLM and SGLang that an attention backend meets.

Names, arguments, shapes and order of calls are those of the public sources: vLLM of 22 August 2026
(commit a014e35), SGLang of 22 August 2026 (commit cce0a12). Everything else is left out.
"""

from __future__ import annotations

import enum
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


def _install(monkeypatch: Any, modules: dict[str, dict[str, Any]]) -> None:
    """Modules with these contents, and the packages around them."""
    for name, contents in modules.items():
        parts = name.split(".")
        for n in range(1, len(parts) + 1):
            path = ".".join(parts[:n])
            if path not in sys.modules:
                module = ModuleType(path)
                module.__path__ = []
                monkeypatch.setitem(sys.modules, path, module)
                if n > 1:
                    setattr(sys.modules[".".join(parts[: n - 1])], parts[n - 1], module)
        for key, value in contents.items():
            setattr(sys.modules[name], key, value)


# vLLM


class MultipleOf:
    def __init__(self, base: int) -> None:
        self.base = base


class AttentionCGSupport(enum.Enum):
    ALWAYS = 3
    NEVER = 0


class VllmBackend(ABC):
    supported_dtypes = (torch.float16, torch.bfloat16)
    supported_kv_cache_dtypes = ("auto", "float16", "bfloat16")
    forward_includes_kv_cache_update = True

    @staticmethod
    @abstractmethod
    def get_name(): ...

    @staticmethod
    @abstractmethod
    def get_impl_cls(): ...

    @staticmethod
    @abstractmethod
    def get_builder_cls(): ...

    @classmethod
    def is_mla(cls):
        return False

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == "decoder"

    @classmethod
    def supports_mm_prefix(cls):
        return False

    @classmethod
    def reasons(cls, head_size, dtype, block_size, capability, **wants):
        """What `validate_configuration` asks a backend."""
        sizes = cls.get_supported_kernel_block_sizes()
        answers = {
            "head_size": cls.supports_head_size(head_size),
            "dtype": dtype in cls.supported_dtypes,
            "kv_cache_dtype": wants.get("kv_cache_dtype", "auto") in cls.supported_kv_cache_dtypes,
            "block_size": any(
                block_size % (x.base if isinstance(x, MultipleOf) else x) == 0 for x in sizes
            ),
            "mla": cls.is_mla() == wants.get("use_mla", False),
            "sinks": cls.supports_sink(),
            "window": cls.supports_sliding_window(),
            "non-causal": cls.supports_non_causal(),
            "batch invariance": cls.supports_batch_invariance(),
            "capability": cls.supports_compute_capability(capability),
            "type": cls.supports_attn_type(wants.get("attn_type", "decoder")),
            "combination": cls.supports_combination(
                head_size, dtype, "auto", block_size, False, True, False, False, capability
            )
            is None,
        }
        return [name for name, answer in answers.items() if not answer]


class VllmBuilder(ABC):
    _cudagraph_support = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.device = device

    @abstractmethod
    def build(self, common_prefix_len, common_attn_metadata, fast_build=False): ...


class VllmImplementation(ABC):
    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.dcp_world_size = 1
        return self

    @abstractmethod
    def __init__(self, num_heads, head_size, scale): ...

    @abstractmethod
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output): ...


def reshape_and_cache_flash(key, value, key_cache, value_cache, slots, dtype, k_scale, v_scale):
    """Key i goes to slot i, counted over blocks; slots of -1 are padding."""
    size = key_cache.shape[1]
    for i, slot in enumerate(slots.tolist()):
        if slot >= 0:
            key_cache[slot // size, slot % size] = key[i]
            value_cache[slot // size, slot % size] = value[i]


def install_vllm(monkeypatch: Any, batch_invariant: bool = True) -> dict[Any, str]:
    """Returns the table of registered class paths."""
    registered: dict[Any, str] = {}
    backends = enum.Enum("AttentionBackendEnum", ["FLASH_ATTN", "CUSTOM"])
    _install(
        monkeypatch,
        {
            "vllm.envs": {"VLLM_BATCH_INVARIANT": batch_invariant},
            "vllm._custom_ops": {"reshape_and_cache_flash": reshape_and_cache_flash},
            "vllm.v1.attention.backend": {
                "AttentionBackend": VllmBackend,
                "AttentionCGSupport": AttentionCGSupport,
                "AttentionImpl": VllmImplementation,
                "AttentionMetadataBuilder": VllmBuilder,
                "MultipleOf": MultipleOf,
            },
            "vllm.v1.attention.backends.registry": {
                "AttentionBackendEnum": backends,
                "register_backend": registered.__setitem__,
            },
        },
    )
    return registered


# SGLang


class SglangBackend:
    needs_cpu_seq_lens = True

    def init_forward_metadata(self, forward_batch):
        self.init_forward_metadata_out_graph(forward_batch)
        self.init_forward_metadata_in_graph(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        pass

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **kwargs):
        decode = forward_batch.forward_mode is ForwardMode.DECODE
        run = self.forward_decode if decode else self.forward_extend
        return run(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache, **kwargs)


class ForwardMode(enum.Enum):
    EXTEND, DECODE, TARGET_VERIFY = 1, 2, 3

    def is_decode_or_idle(self):
        return self is ForwardMode.DECODE

    def is_target_verify(self):
        return self is ForwardMode.TARGET_VERIFY

    def is_draft_extend_v2(self):
        return False


@dataclass
class KVWriteLoc:
    loc: torch.Tensor
    swa_loc: torch.Tensor | None = None


class SWAKVPool:
    """A pool with memory of its own for sliding windows."""


class Pool:
    """Slots of one layer."""

    def __init__(self, slots: int, heads: int, D: int, dtype: torch.dtype = torch.float32) -> None:
        self.k = torch.full((slots, heads, D), torch.nan, dtype=dtype)
        self.v = torch.full((slots, heads, D), torch.nan, dtype=dtype)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v):
        self.k[loc_info.loc], self.v[loc_info.loc] = cache_k, cache_v

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def install_sglang(monkeypatch: Any) -> tuple[dict[str, Any], Any]:
    """Returns the registry of backends, and the module of the server's arguments."""
    registered: dict[str, Any] = {}
    arguments = SimpleNamespace(
        ATTENTION_BACKEND_CHOICES=["triton"], deterministic=["triton"], radix=["triton"]
    )
    _install(
        monkeypatch,
        {
            "sglang.srt.layers.attention.attention_registry": {
                "register_attention_backend": lambda name: (
                    lambda made: registered.setdefault(name, made)
                )
            },
            "sglang.srt.layers.attention.base_attn_backend": {"AttentionBackend": SglangBackend},
            "sglang.srt.mem_cache.memory_pool": {"KVWriteLoc": KVWriteLoc},
            "sglang.srt.mem_cache.swa_memory_pool": {"SWAKVPool": SWAKVPool},
            "sglang.srt.server_args": {
                "ATTENTION_BACKEND_CHOICES": arguments.ATTENTION_BACKEND_CHOICES,
                "add_attention_backend_choices": arguments.ATTENTION_BACKEND_CHOICES.extend,
                "add_deterministic_attention_backend_choices": arguments.deterministic.extend,
                "add_radix_supported_deterministic_attention_backend_choices": (
                    arguments.radix.extend
                ),
            },
        },
    )
    return registered, arguments
