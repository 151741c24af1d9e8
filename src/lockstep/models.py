"""Attention of published models: heads, head dims and masks, as their configurations give them.

A model has one or more kinds of attention layer. TP 8 stands for one of eight tensor-parallel
shards, which has an eighth of the heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.options import Options, Window


@dataclass(frozen=True)
class Layer:
    """One kind of attention layer: what `lockstep.attention` takes besides lengths and data.

    `Dv` 0 stands for a head dim of values equal to D. With `cross`, keys are those of another
    sequence, such as a text beside an image. `lengths` are the least and the most tokens of a
    sequence, `keys` those of the other one; None stands for any number.
    """

    Hq: int
    Hkv: int
    D: int
    Dv: int = 0
    causal: bool = True
    window: Window | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    cross: bool = False
    lengths: tuple[int, int] | None = None
    keys: tuple[int, int] | None = None

    @property
    def value_dim(self) -> int:
        return self.Dv or self.D

    @property
    def options(self) -> Options:
        left, right = self.window or (None, None)
        return Options(self.causal, left, right, self.scale, self.softcap)


Lengths = tuple[int, int]


def _encoder(
    heads: int, D: int, window: Window | None = None, lengths: Lengths | None = None
) -> Layer:
    return Layer(heads, heads, D, causal=False, window=window, lengths=lengths)


def _cross(heads: int, D: int, lengths: Lengths, keys: Lengths) -> Layer:
    return Layer(heads, heads, D, causal=False, cross=True, lengths=lengths, keys=keys)


def _up_to(n: int) -> Lengths:
    return 1, n


def _all(n: int) -> Lengths:
    """Every sequence has `n` tokens."""
    return n, n


def _last(n: int) -> Window:
    """A causal row sees `n` keys: itself and those before it."""
    return n - 1, 0


# Layers by name, those of a model together.
MODELS: dict[str, dict[str, Layer]] = {
    "Llama 3 8B": {"self": Layer(32, 8, 128)},
    "Llama 3 70B TP 8": {"self": Layer(8, 1, 128)},
    "Qwen 3 0.6B": {"self": Layer(16, 8, 128)},
    "Qwen 3 30B-A3B": {"self": Layer(32, 4, 128)},
    "Mistral 7B": {"self": Layer(32, 8, 128, window=_last(4096))},
    "Gemma 2 9B": {
        "global": Layer(16, 8, 256, softcap=50.0),
        "local": Layer(16, 8, 256, softcap=50.0, window=_last(4096)),
    },
    "Gemma 2 27B": {
        "global": Layer(32, 16, 128, softcap=50.0, scale=144**-0.5),
        "local": Layer(32, 16, 128, softcap=50.0, scale=144**-0.5, window=_last(4096)),
    },
    "Gemma 3 4B": {
        "global": Layer(8, 4, 256),
        "local": Layer(8, 4, 256, window=_last(1024)),
    },
    "Gemma 3 27B": {
        "global": Layer(32, 16, 128, scale=168**-0.5),
        "local": Layer(32, 16, 128, scale=168**-0.5, window=_last(1024)),
    },
    "gpt-oss": {
        "global": Layer(64, 8, 64, sinks=True),
        "local": Layer(64, 8, 64, sinks=True, window=_last(128)),
    },
    "DeepSeek V3 TP 8": {"self": Layer(16, 16, 192, 128)},
    "Phi-2": {"self": Layer(32, 32, 80, lengths=_up_to(2048))},
    "Phi-3 mini": {"self": Layer(32, 32, 96, lengths=_up_to(4096))},
    "StableLM 2 12B": {"self": Layer(32, 8, 160, lengths=_up_to(4096))},
    "BERT large": {"self": _encoder(16, 64, lengths=_up_to(512))},
    "ModernBERT base": {
        "global": _encoder(12, 64, lengths=_up_to(8192)),
        "local": _encoder(12, 64, (64, 64), _up_to(8192)),
    },
    "ViT-B/16": {"self": _encoder(12, 64, lengths=_all(197))},
    "SigLIP So400m": {"self": _encoder(16, 72, lengths=_all(729))},
    "Qwen 2.5 VL vision": {"self": _encoder(16, 80)},
    "Whisper large v3": {
        "encoder": _encoder(20, 64, lengths=_all(1500)),
        "decoder": Layer(20, 20, 64, lengths=_up_to(448)),
        "cross": _cross(20, 64, _up_to(448), _all(1500)),
    },
    "SDXL": {
        "self": _encoder(10, 64, lengths=(256, 16384)),
        "cross": _cross(10, 64, (256, 16384), _all(77)),
    },
    "Flux.1": {"self": _encoder(24, 128, lengths=(512, 16896))},
    "CogVideoX 2B": {"self": _encoder(30, 64, lengths=(1576, 17776))},
    "Wan 2.1 1.3B": {
        "self": _encoder(12, 128, lengths=(1560, 131072)),
        "cross": _cross(12, 128, (1560, 131072), _all(512)),
    },
}
