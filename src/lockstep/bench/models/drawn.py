"""Cases drawn at random beside those of models: other heads, head dims and lengths."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random

from lockstep.bench.models.cases import Case, Kind
from lockstep.models import Layer

# Of a hundred cases, how many are of each kind; and how many more are served at once.
SHARES: dict[Kind, int] = {"forward": 50, "decode": 25, "backward": 25, "serve": 12}
HEAD_DIMS = (40, 64, 64, 64, 72, 80, 96, 112, 128, 128, 128, 128, 160, 192, 256, 256)
KV_HEADS = (1, 1, 2, 3, 4, 5, 8, 8, 10, 12, 16, 20, 32)
GROUPS = (1, 1, 1, 2, 3, 4, 4, 5, 7, 8, 8, 16)  # query heads of a key head
MOST_HEADS = 80
PAGES = (16, 16, 64, 256)
MOST_BYTES = 2**31  # of a cache
# Largest lengths: a checked piece of a backward is a whole sequence.
LONGEST = {"forward": 16000, "backward": 5000}

LEAST = Layer(1, 1, 64)


@dataclass(frozen=True)
class DrawnCase(Case):
    """A case whose layer is its own, not a model's."""

    own: Layer = LEAST

    @property
    def shape(self) -> Layer:
        return self.own

    @property
    def subject(self) -> str:
        layer = self.own
        words = [f"{layer.Hq}/{layer.Hkv} heads", f"D {layer.D}"]
        if layer.Dv:
            words[1] += f" and {layer.Dv}"
        if layer.window is not None:
            words.append(f"window of {(layer.window[0] or 0) + 1}")
        elif layer.causal:
            words.append("causal")
        if layer.softcap is not None:
            words.append("softcap")
        if layer.sinks:
            words.append("sinks")
        return ", ".join(words)


def draw(seed: int, n: int = 100) -> list[Case]:
    """About `n` cases, always the same for a seed, those of a kind together."""
    rng = Random(seed)
    how = {"decode": _decode, "serve": _served}
    return [
        how[kind](rng) if kind in how else _prefill(rng, kind)
        for kind, share in SHARES.items()
        for _ in range(max(1, share * n // 100))
    ]


def _layer(rng: Random) -> Layer:
    Hkv = rng.choice(KV_HEADS)
    Hq = Hkv * rng.choice([g for g in GROUPS if g * Hkv <= MOST_HEADS])
    D = rng.choice(HEAD_DIMS)
    Dv = 128 if D == 192 else 0
    causal = rng.random() < 0.65
    layer = Layer(Hq, Hkv, D, Dv, causal=causal)
    if causal and rng.random() < 0.25:
        layer = replace(layer, window=(_spread(rng, 64, 4096) - 1, 0), sinks=rng.random() < 0.3)
    if causal and rng.random() < 0.05:
        layer = replace(layer, softcap=50.0)
    return layer


def _prefill(rng: Random, kind: Kind) -> Case:
    """All keys with all queries, keys of another text, more keys than queries, or packed."""
    layer = _layer(rng)
    S = _spread(rng, 40, LONGEST[kind])
    work = _spread(rng, 10**10, 10**12) / (1 if kind == "forward" else 3)
    B = round(work / (4 * layer.Hq * layer.D * S * S))
    B = max(1, min(B, 256, 2**29 // (layer.Hq * layer.D * S)))
    how, Skv = rng.random(), _spread(rng, 40, LONGEST[kind])
    training = kind == "backward"
    if how < 0.2 and B > 1:
        text = "packed training" if training else "packed"
        return DrawnCase(kind, "", "", text, B, S, packed=True, long_tailed=True, own=layer)
    text, keys = "prefill", 0
    if 0.2 < how < 0.35 and not layer.causal:
        text, keys = "cross-attention", Skv
    elif 0.2 < how < 0.35 and Skv > S:
        text, keys = "chunked prefill", Skv
    return DrawnCase(kind, "", "", "training" if training else text, B, S, keys, own=layer)


def _decode(rng: Random) -> Case:
    layer = replace(_layer(rng), causal=True)
    Skv = _spread(rng, 256, 60000)
    bytes_of_one = 2 * Skv * layer.Hkv * (layer.D + layer.value_dim)
    B = max(1, min(_spread(rng, 1, 160), MOST_BYTES // bytes_of_one))
    Sq = rng.choice((1, 1, 1, 1, 2, 4, 5, 8))
    work = "decode" if Sq == 1 else "speculative decode"
    tailed = B > 4 and rng.random() < 0.4
    page = rng.choice(PAGES)
    return DrawnCase("decode", "", "", work, B, Sq, Skv, page, long_tailed=tailed, own=layer)


def _served(rng: Random) -> Case:
    """Prompts, or chunks of some beside single tokens of other sequences."""
    layer = replace(_layer(rng), causal=True)
    mean, page = _spread(rng, 200, 16000), rng.choice(PAGES)
    most = max(1, MOST_BYTES // (2 * mean * layer.Hkv * (layer.D + layer.value_dim)))
    if rng.random() < 0.3:
        B = min(_spread(rng, 2, 40), most)
        return DrawnCase("serve", "", "", "prompts", B, mean, 0, page, True, True, own=layer)
    chunks = tuple(_spread(rng, 30, 4096) for _ in range(rng.choice((1, 1, 2, 4))))
    B = len(chunks) + min(rng.choice((0, _spread(rng, 1, 120))), most)
    work = f"chunks of {', '.join(map(str, chunks))}, decode"
    return DrawnCase("serve", "", "", work, B, 1, mean, page, True, True, chunks, own=layer)


def _spread(rng: Random, least: int, most: int) -> int:
    """A number whose logarithm is evenly spread."""
    return round(math.exp(rng.uniform(math.log(least), math.log(most))))
