"""Lockstep as an attention implementation of Hugging Face transformers.

from lockstep.integrations import transformers as lockstep_for_transformers

lockstep_for_transformers.register()
model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="lockstep")
"""

from __future__ import annotations

from functools import partial

from lockstep.integrations.transformers.attention import attend
from lockstep.integrations.transformers.masks import make_mask

NAME = "lockstep"


def register(*, query_invariant: bool = False) -> None:
    """Make `attn_implementation="lockstep"` known to transformers.

    Registers the attention and the masks that go with it. Models then take the name in
    `from_pretrained`, `from_config` and `set_attn_implementation`. Registering again replaces the
    earlier registration.

    Args:
        query_invariant: What `lockstep.attention` takes under that name: a token's attention
            output then has the same bits in a prefill, in a chunk of it and in decoding.

    Raises:
        ImportError: transformers 5.20 or newer is not installed.

    Example:
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> register()
        >>> sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
        >>> config = LlamaConfig(**sizes, num_attention_heads=4, vocab_size=100)
        >>> model = LlamaForCausalLM._from_config(config, attn_implementation="lockstep")
        >>> model(torch.arange(10)[None]).logits.shape
        torch.Size([1, 10, 100])
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, partial(attend, query_invariant=query_invariant))
    AttentionMaskInterface.register(NAME, make_mask)
