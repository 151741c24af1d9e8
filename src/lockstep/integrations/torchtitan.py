"""Lockstep as the attention of packed documents in torchtitan.

    torchtitan ... --override.imports lockstep.integrations.torchtitan.attention

replaces every `VarlenAttention` of a model, which `attn_backend="varlen"` gives it. Gradients are
those of `lockstep.attention_varlen`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import make_dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from torch import Tensor

from lockstep.api import attention_varlen


class Layer:
    """The interface that a layer of torchtitan expects of its inner attention."""

    window_size: tuple[int, int]

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        attention_masks: Any,
        scale: float | None = None,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of each document of a batch to itself.

        Args:
            q: [B, S, Hq, D]; k: [B, S, Hkv, D]; v: [B, S, Hkv, Dv]
            attention_masks: A `VarlenMetadata`: where documents begin among the B · S tokens.
            out_transform: Takes out and lse [B, S, Hq], and returns what the layer returns.
            kwargs: Not looked at: heads are grouped wherever their numbers differ.

        Returns:
            out [B, S, Hq, Dv]
        """
        B, S = q.shape[:2]
        left, right = (None if reach < 0 else reach for reach in self.window_size)
        out, lse = attention_varlen(
            q.flatten(0, 1),
            k.flatten(0, 1),
            v.flatten(0, 1),
            attention_masks.cu_seq_q,
            attention_masks.cu_seq_k,
            window=(left, right),
            scale=scale,
            return_lse=True,
        )
        out, lse = out.view(B, S, *out.shape[1:]), lse.view(B, S, -1)
        return out if out_transform is None else out_transform(out, lse)


@cache
def _layer() -> Any:
    """`Layer` with torchtitan's as its base."""
    from torchtitan.models.common.attention import VarlenAttention

    def initialize(self: Any, config: Any) -> None:
        # Not as VarlenAttention does, which loads FlashAttention.
        super(VarlenAttention, self).__init__()
        self.window_size = config.window_size

    config = make_dataclass("Config", (), bases=(VarlenAttention.Config,), kw_only=True, slots=True)
    members = {"__module__": __name__, "__init__": initialize, "Config": config}
    return type("LockstepAttention", (Layer, VarlenAttention), members)


def attention(config: Any) -> Any:
    """The configuration that takes the place of a `VarlenAttention.Config`."""
    from torchtitan.config import derive

    return derive(config, _layer().Config)


def _register() -> None:
    from torchtitan.config import override
    from torchtitan.models.common.attention import VarlenAttention

    description = "Lockstep's attention of packed documents"
    override(target=VarlenAttention.Config, description=description, exact=True)(attention)


if find_spec("torchtitan") is not None:
    _register()
