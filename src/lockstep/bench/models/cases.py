"""The cases of `lockstep bench gpu --suite models`: which model, doing what, at which lengths."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lockstep.bench.lengths import long_tailed_lengths
from lockstep.models import MODELS, Layer

Kind = Literal["forward", "backward", "decode", "serve"]
KINDS: tuple[Kind, ...] = ("forward", "backward", "decode", "serve")
UNITS: dict[Kind, str] = dict.fromkeys(KINDS, "TFLOP/s") | {"decode": "GB/s"}


@dataclass(frozen=True)
class Case:
    """One call of one layer.

    Sq, Skv: Queries and keys of each sequence; with `long_tailed`, of a sequence on average (keys,
        and queries too if packed). Skv 0 stands for as many keys as queries.
    page: Tokens of a page of the cache, 0 without one.
    packed: The sequences lie after one another, without padding.
    chunks: Of what an engine serves at once, the queries of the first sequences: chunks of prompts,
        beside sequences with Sq queries each.
    """

    kind: Kind
    model: str
    layer: str
    work: str
    B: int
    Sq: int
    Skv: int = 0
    page: int = 0
    packed: bool = False
    long_tailed: bool = False
    chunks: tuple[int, ...] = ()

    @property
    def shape(self) -> Layer:
        return MODELS[self.model][self.layer]

    @property
    def keys(self) -> int:
        return self.Skv or self.Sq

    @property
    def subject(self) -> str:
        """Model and layer."""
        return self.model + f" {self.layer}" * (len(MODELS[self.model]) > 1)

    @property
    def name(self) -> str:
        lengths = _size(self.Sq) if self.keys == self.Sq else _lengths(self.Sq, self.keys)
        many = f"{self.B} × " * (self.B > 1)
        how = " long-tailed" * self.long_tailed + f", pages of {self.page}" * (self.page > 0)
        return f"{self.subject}, {self.work} {many}{lengths}{how}"

    @property
    def kv_lens(self) -> list[int]:
        """Keys of each sequence."""
        lens = [self.keys] * self.B
        if self.long_tailed:
            lens = long_tailed_lengths(self.B, self.B * self.keys)
        if not self.Skv:
            return [max(1, n) for n in lens]
        # A cache holds the queries, too.
        return [max(pair) for pair in zip(self.q_lens, lens, strict=True)]

    @property
    def q_lens(self) -> list[int]:
        """Queries of each sequence."""
        if self.packed and not self.Skv:
            return self.kv_lens
        return [*self.chunks, *[self.Sq] * (self.B - len(self.chunks))]


def choose(
    pattern: str = "", kinds: Sequence[str] = (), among: Sequence[Case] | None = None
) -> list[Case]:
    """The cases of these kinds in whose names the regular expression occurs; empty means any.

    Those of models, unless `among` has others.

    Raises re.error for a pattern that is none.
    """
    found = re.compile(pattern, re.IGNORECASE)
    return [c for c in among or CASES if (not kinds or c.kind in kinds) and found.search(c.name)]


def _size(n: int) -> str:
    return f"{n // 1024}k" if n % 1024 == 0 and n >= 1024 else str(n)


def _lengths(Sq: int, Skv: int) -> str:
    return f"{_size(Skv)} keys" if Sq == 1 else f"{_size(Sq)} to {_size(Skv)} keys"


def _forward(model: str, layer: str, work: str, B: int, Sq: int, Skv: int = 0) -> Case:
    return Case("forward", model, layer, work, B, Sq, Skv)


def _train(model: str, layer: str, B: int, Sq: int, Skv: int = 0) -> Case:
    return Case("backward", model, layer, "training", B, Sq, Skv)


def _decode(model: str, layer: str, B: int, Skv: int, page: int, tailed: bool = False) -> Case:
    return Case("decode", model, layer, "decode", B, 1, Skv, page, long_tailed=tailed)


def _verify(
    model: str, layer: str, B: int, Sq: int, Skv: int, page: int, tailed: bool = False
) -> Case:
    return Case("decode", model, layer, "speculative decode", B, Sq, Skv, page, long_tailed=tailed)


def _packed(kind: Kind, model: str, layer: str, B: int, mean: int, tailed: bool = True) -> Case:
    work = "packed training" if kind == "backward" else "packed"
    return Case(kind, model, layer, work, B, mean, packed=True, long_tailed=tailed)


def _serve(
    model: str, layer: str, chunks: tuple[int, ...], decodes: int, Skv: int, page: int
) -> Case:
    work = "chunks of " + ", ".join(map(str, chunks)) + ", decode" * (decodes > 0)
    B = len(chunks) + decodes
    return Case("serve", model, layer, work, B, 1, Skv, page, True, decodes > 0, chunks)


def _prompts(model: str, layer: str, B: int, mean: int, page: int) -> Case:
    return Case("serve", model, layer, "prompts", B, mean, 0, page, True, True)


CASES: tuple[Case, ...] = (
    _forward("Llama 3 8B", "self", "prefill", 1, 8192),
    _forward("Llama 3 8B", "self", "prefill", 1, 32768),
    _forward("Llama 3 8B", "self", "chunked prefill", 1, 2048, 32768),
    Case("forward", "Llama 3 8B", "self", "chunked prefill", 4, 512, 8192, 16),
    _packed("forward", "Llama 3 8B", "self", 32, 1024),
    _forward("Llama 3 70B TP 8", "self", "prefill", 1, 16384),
    _forward("Qwen 3 0.6B", "self", "prefill", 32, 512),
    _forward("Qwen 3 30B-A3B", "self", "prefill", 4, 4096),
    _forward("Mistral 7B", "self", "prefill", 1, 16384),
    _forward("Gemma 2 9B", "global", "prefill", 1, 8192),
    _forward("Gemma 2 27B", "local", "prefill", 1, 8192),
    _forward("Gemma 3 27B", "local", "prefill", 1, 16384),
    _forward("Gemma 3 4B", "local", "prefill", 2, 8192),
    _forward("gpt-oss", "local", "prefill", 1, 8192),
    _forward("gpt-oss", "global", "prefill", 1, 8192),
    _forward("DeepSeek V3 TP 8", "self", "prefill", 1, 8192),
    _forward("Phi-2", "self", "prefill", 8, 2048),
    _forward("Phi-3 mini", "self", "prefill", 2, 4096),
    _forward("StableLM 2 12B", "self", "prefill", 2, 4096),
    _forward("BERT large", "self", "encode", 32, 512),
    _packed("forward", "ModernBERT base", "local", 16, 1024),
    _forward("ViT-B/16", "self", "encode", 128, 197),
    _forward("SigLIP So400m", "self", "encode", 32, 729),
    _packed("forward", "Qwen 2.5 VL vision", "self", 256, 64, tailed=False),
    _forward("Whisper large v3", "encoder", "encode", 16, 1500),
    _forward("Whisper large v3", "cross", "cross-attention", 16, 448, 1500),
    _forward("SDXL", "self", "denoise", 2, 4096),
    _forward("SDXL", "cross", "cross-attention", 2, 4096, 77),
    _forward("Flux.1", "self", "denoise", 1, 4608),
    _forward("Wan 2.1 1.3B", "self", "denoise", 1, 32760),
    _forward("Wan 2.1 1.3B", "cross", "cross-attention", 1, 32760, 512),
    _decode("Llama 3 8B", "self", 1, 32768, 16),
    _decode("Llama 3 8B", "self", 16, 16384, 256),
    _decode("Llama 3 8B", "self", 64, 4096, 16),
    _decode("Llama 3 8B", "self", 64, 4096, 16, tailed=True),
    _decode("Llama 3 8B", "self", 256, 512, 16),
    _decode("Llama 3 70B TP 8", "self", 1, 102400, 16),
    _decode("Llama 3 70B TP 8", "self", 32, 8192, 64, tailed=True),
    _decode("Qwen 3 30B-A3B", "self", 16, 8192, 64),
    _decode("Mistral 7B", "self", 32, 16384, 16),
    _decode("Gemma 2 9B", "global", 16, 4096, 256),
    _decode("Gemma 3 4B", "global", 32, 8192, 16, tailed=True),
    _decode("gpt-oss", "local", 64, 8192, 16),
    _decode("gpt-oss", "global", 64, 4096, 64),
    _decode("Phi-3 mini", "self", 16, 4096, 16),
    _verify("Llama 3 8B", "self", 16, 4, 8192, 16),
    _verify("Llama 3 70B TP 8", "self", 64, 2, 4096, 256, tailed=True),
    _verify("Qwen 3 30B-A3B", "self", 1, 8, 32768, 64),
    _verify("gpt-oss", "global", 32, 4, 8192, 16),
    _serve("Llama 3 8B", "self", (2048,), 0, 8192, 16),
    _serve("Llama 3 8B", "self", (1024,), 63, 4096, 16),
    _serve("Llama 3 8B", "self", (512, 512, 300), 29, 2048, 64),
    _prompts("Llama 3 8B", "self", 8, 1024, 16),
    _serve("Llama 3 70B TP 8", "self", (2048,), 64, 4096, 16),
    _serve("Llama 3 70B TP 8", "self", (512,), 0, 32768, 16),
    _serve("Qwen 3 30B-A3B", "self", (2048,), 32, 4096, 64),
    _serve("gpt-oss", "local", (2048,), 32, 8192, 16),
    _serve("gpt-oss", "global", (2048,), 32, 8192, 16),
    _serve("Gemma 3 27B", "local", (4096,), 16, 8192, 16),
    _serve("Phi-3 mini", "self", (1024,), 16, 4096, 16),
    _train("Llama 3 8B", "self", 1, 8192),
    _packed("backward", "Llama 3 8B", "self", 32, 1024),
    _train("Qwen 3 0.6B", "self", 8, 2048),
    _train("Mistral 7B", "self", 1, 8192),
    _train("Gemma 2 9B", "global", 2, 4096),
    _train("gpt-oss", "local", 1, 4096),
    _train("DeepSeek V3 TP 8", "self", 2, 4096),
    _train("Phi-3 mini", "self", 2, 4096),
    _train("BERT large", "self", 32, 512),
    _train("ViT-B/16", "self", 128, 197),
    _train("SigLIP So400m", "self", 32, 729),
    _train("SDXL", "cross", 4, 4096, 77),
    _train("Flux.1", "self", 1, 4608),
    _train("CogVideoX 2B", "self", 1, 17776),
)
