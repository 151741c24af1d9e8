"""Calls that stand for all that a model makes: together they need every build of its layers.

A build serves every length and batch size, but for a few that decide between kernels. The lengths
below are one of each kind; those that a model does not have become its shortest or longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Literal

from lockstep.models import Layer

Work = Literal["prefill", "packed", "decode", "serve", "training"]
WORKS: tuple[Work, ...] = ("prefill", "packed", "decode", "serve", "training")
# Lengths that stand for all: a prompt, packed prompts that are sorted by length, a chunk of a
# prompt, what is left for a last chunk, or little of it, a draft to verify, and a long and a short
# cache.
PROMPT, PACKED, CHUNK, REST, LITTLE, DRAFT, LONG, SHORT = 1024, 8192, 256, 96, 24, 4, 16384, 256
# Head dims up to which the length decides between more builds; lengths that have another one, if
# causal and for narrow heads, for the forward and for the backward; and how many sequences make
# packed ones short, and how many not as short.
NARROW, LONGER_PROMPT, LONG_PROMPT, LONG_TRAINED = 64, 2048, 16384, 2048
# A length that has another one without a mask, for heads up to so wide.
SHORTER_PROMPT, WIDEST_OF_SHORTER = 512, 128
MANY_PACKED, SOME_PACKED = 16, 4
# Lengths of training at which the Hopper backward shares queries out among programs, or does not,
# where query heads share keys under a mask; one more for narrow heads. Without a mask, queries and
# keys of cross-attention, which grouped heads may share out at other lengths, too.
GROUPED_TRAINED, LONGEST_TRAINED, CROSS_TRAINED = (160, 2048, 4096), 16512, (4096, 77)
# And without a mask, keys that are so few that dq is finished early.
FEW_TRAINED = 256
# Head dims whose backward without a mask cuts loops over queries where tiles of keys, of all heads,
# are too many for whole rounds of a GPU's programs; how many tiles of one head make whole rounds on
# 132 SMs, how many of all heads do not, and the least of one head.
CUT, ROUND_TILES, CUT_TILES, LEAST_CUT_TILES, KEYS_OF_TILE = (64, 128), 132, 710, 9, 128
# Head dims whose keys are copied to aligned rows if many queries see them.
UNALIGNED = (72, 88)
# How much shorter lengths are that no tile divides; unless causal, they have another
# backward.
ODD = 24
# Sequences that keep a GPU busy without being split.
MANY = 256
# Heads of several sequences that are cut in decode, too many for programs to fold them themselves.
CUT_HEADS = 60
# Lengths of images and short texts, which come in large batches: of how many heads.
IMAGES, HEADS_OF_IMAGES = (160, 257), 1024
# And of texts in batches that are not as large.
SOME, HEADS_OF_SOME = (256,), 80
# Keys of short texts, of which all are one block for heads up to so wide, and for narrow ones
# without a mask more; and of packed ones.
TEXTS, ODD_TEXTS, PACKED_TEXTS, WIDEST_OF_TEXTS = (64, 112), (80,), (64, 128), 128
# Keys that stay in shared memory, of wider heads, and of heads whose rows are not aligned.
WIDE_TEXT, UNALIGNED_TEXT = 64, 192
# Queries of which a last tile has few, and how many heads make them so many that it matters.
MORE_THAN_A_TILE, HEADS_OF_GROUPS = 130, 512
# Sequences, all their queries, and the keys of each, of what is served at once: few single tokens,
# whose parts are folded in several ways or not at all, many, and a prompt among them.
SERVED = ((1, 1, SHORT), (1, 1, LONG), (3, 3, LONG), (64, 64, LONG), (4, 8192, LONG))
# Those of single tokens that are known to be no more; and rows of a KV head up to which drafts that
# are known to be short have another build.
SINGLE, MOST_SHORT_ROWS = SERVED[:3], 16
# Of calls on a CPU.
LENGTH_ON_CPU = 512
ANY = (1, 1 << 30)


@dataclass(frozen=True)
class SampleCall:
    """One small call that has a kernel compiled. A `page` of 0 is no pages; of packed sequences, Sq
    and Skv are the sums over B equal ones, of ragged queries in pages Sq is, and the first sequence
    has most of them: no more than `max_seqlen_q`, if the call says so."""

    layer: Layer
    layout: Literal["dense", "packed", "paged", "ragged"]
    Sq: int
    Skv: int
    backward: bool = False
    page: int = 0
    B: int = 1
    max_seqlen_q: int | None = None

    @property
    def name(self) -> str:
        direction = "backward" if self.backward else "forward"
        return f"{self.layout} {direction}, {self.Sq} queries, {self.Skv} keys, D {self.layer.D}"


def calls_of(
    layers: Iterable[Layer], works: Sequence[str] = WORKS, page: int = 16, on_cpu: bool = False
) -> list[SampleCall]:
    """The calls that make all builds of these layers.

    Raises ValueError for an unknown work or a page without a token.
    """
    unknown = [work for work in works if work not in WORKS]
    if unknown:
        raise ValueError(f"works takes {', '.join(WORKS)}, got {unknown[0]!r}")
    if page < 1:
        raise ValueError(f"page takes at least 1, got {page}")
    found = [call for layer in layers for call in _calls_of(layer, works, page)]
    return list(dict.fromkeys(map(_on_cpu, found) if on_cpu else found))


def _calls_of(layer: Layer, works: Sequence[str], page: int) -> Iterator[SampleCall]:
    """Those of one layer, at lengths that it has."""
    packed = list(_packed(layer)) if "packed" in works else []
    found: list[SampleCall] = []
    if "training" in works:
        short = [call for call in packed if call.B <= MANY_PACKED]
        found += (replace(call, backward=True) for call in (*_trained(layer), *short))
    if "prefill" in works:
        found += _prompts(layer)
    found += packed
    if "packed" in works:
        found += _groups(layer, packed=True)
    if "decode" in works:
        found += _decoded(layer, page)
    if "serve" in works and layer.causal:
        found += _served(layer, page)
    queries = layer.lengths or ANY
    yield from (_within(call, queries, layer.keys or queries) for call in found)


def _on_cpu(call: SampleCall) -> SampleCall:
    """A call with the same build for a CPU, which serves any length."""
    has_few_queries = call.layout in ("paged", "ragged") or call.Sq == 1
    lengths = (1 if has_few_queries else LENGTH_ON_CPU, LENGTH_ON_CPU)
    return _within(replace(call, B=1, max_seqlen_q=None), lengths, lengths)


def _within(call: SampleCall, queries: tuple[int, int], keys: tuple[int, int]) -> SampleCall:
    """The same call of sequences that are at least and at most as long as these; of several that
    are served at once, queries are left as they are."""
    if call.layout == "ragged" and call.B > 1:
        return replace(call, Skv=min(max(call.Skv, keys[0]), keys[1]))
    n = call.B if call.layout == "packed" else 1
    Sq, Skv = call.Sq // n, call.Skv // n
    Sq, Skv = min(max(Sq, queries[0]), queries[1]), min(max(Skv, keys[0]), keys[1])
    return replace(call, Sq=n * Sq, Skv=n * Skv)


def _prompts(layer: Layer) -> Iterator[SampleCall]:
    """A whole sequence at once. One that is no longer than a window may run without it."""
    if layer.window is not None and layer.causal:
        length = (layer.window[0] or 0) + 1
        within = _prompts(replace(layer, window=None))
        yield from (replace(call, layer=layer) for call in within if call.Skv <= length)
        if PROMPT <= length < LONG_PROMPT:
            yield SampleCall(layer, "dense", LONG_PROMPT, LONG_PROMPT)
    is_narrow = max(layer.D, layer.value_dim) <= NARROW
    lengths = [PROMPT, *_texts(layer)]
    if layer.causal:
        lengths.append(LONGER_PROMPT)
    elif layer.window is None and max(layer.D, layer.value_dim) <= WIDEST_OF_SHORTER:
        lengths.append(SHORTER_PROMPT)
    if is_narrow or layer.D in UNALIGNED:
        lengths.append(LONG_PROMPT)
    if layer.window is None and layer.D > WIDEST_OF_TEXTS:
        lengths.append(WIDE_TEXT)
    if layer.D in UNALIGNED and layer.window is None and not layer.causal:
        lengths.append(UNALIGNED_TEXT)
    yield from (SampleCall(layer, "dense", n, n) for n in lengths)
    if layer.window is None:
        batches = [(n, HEADS_OF_SOME) for n in SOME]
        batches += [] if layer.causal else [(n, HEADS_OF_IMAGES) for n in IMAGES]
        sizes = ((n, -(-heads // layer.Hq)) for n, heads in batches)
        yield from (SampleCall(layer, "dense", n, n, B=B) for n, B in sizes)
    yield from _groups(layer, packed=False)


def _groups(layer: Layer, packed: bool) -> Iterator[SampleCall]:
    """Sequences with a tile and few more queries on many keys, so many that heads which share keys
    share tiles, too."""
    if layer.Hq == layer.Hkv or layer.window is not None:
        return
    layout: Literal["packed", "dense"]
    widest, B = max(layer.D, layer.value_dim), -(-HEADS_OF_GROUPS // layer.Hq)
    has_groups = widest > WIDEST_OF_TEXTS or not packed
    if layer.softcap is not None:
        has_groups = widest <= WIDEST_OF_TEXTS and not packed
    if has_groups:
        n, layout = (B, "packed") if packed else (1, "dense")
        yield SampleCall(layer, layout, n * MORE_THAN_A_TILE, n * LONGER_PROMPT, B=B)
    elif packed and not layer.causal and widest > NARROW:
        yield SampleCall(layer, "packed", B * MORE_THAN_A_TILE, B * MORE_THAN_A_TILE, B=B)


def _texts(layer: Layer) -> tuple[int, ...]:
    """Lengths of short texts, if they have builds of their own."""
    if layer.D > WIDEST_OF_TEXTS or layer.window is not None:
        return ()
    is_narrow = max(layer.D, layer.value_dim) <= NARROW
    return TEXTS + (ODD_TEXTS if is_narrow and not layer.causal else ())


def _packed(layer: Layer) -> Iterator[SampleCall]:
    """Sequences of as many tokens in all."""
    is_narrow = max(layer.D, layer.value_dim) <= NARROW
    counts = [1, MANY_PACKED] if is_narrow or layer.causal else [1]
    counts += [SOME_PACKED] if is_narrow and layer.causal else []
    counts += [PACKED // n for n in PACKED_TEXTS if _texts(layer)]
    yield from (SampleCall(layer, "packed", PACKED, PACKED, B=B) for B in counts)


def _trained(layer: Layer) -> Iterator[SampleCall]:
    """Sequences that have gradients."""
    is_narrow = max(layer.D, layer.value_dim) <= NARROW
    is_masked = layer.causal or layer.window is not None
    found = [SampleCall(layer, "dense", PROMPT, PROMPT)]
    if is_narrow:
        found.append(SampleCall(layer, "dense", LONG_TRAINED, LONG_TRAINED))
    if not is_masked and layer.value_dim == layer.D and layer.D in CUT:
        found += _cut(layer)
    if not is_masked:
        found.append(SampleCall(layer, "dense", FEW_TRAINED, FEW_TRAINED))
    if not layer.causal:
        found += [replace(call, Sq=call.Sq - ODD, Skv=call.Skv - ODD) for call in found]
    if is_masked and layer.Hq > layer.Hkv:
        lengths = [*GROUPED_TRAINED, *([LONGEST_TRAINED] if is_narrow else [])]
        found += [SampleCall(layer, "dense", n, n) for n in lengths]
    if not is_masked and (layer.cross or layer.Hq > layer.Hkv):
        found.append(SampleCall(layer, "dense", *CROSS_TRAINED))
    yield from found


def _cut(layer: Layer) -> list[SampleCall]:
    """Calls whose loops are cut, and others whose are not; none, if sequences are too short."""
    _, longest = layer.keys or layer.lengths or (1, ROUND_TILES * KEYS_OF_TILE)
    most = -(-longest // KEYS_OF_TILE)
    if most < LEAST_CUT_TILES:
        return []
    tiles = min(max(-(-CUT_TILES // layer.Hkv), LEAST_CUT_TILES), most)
    whole = min(ROUND_TILES, most)
    batches = {
        whole: ROUND_TILES // gcd(whole * layer.Hkv, ROUND_TILES),
        tiles: -(-CUT_TILES // (tiles * layer.Hkv)),
    }
    sizes = ((n * KEYS_OF_TILE, B) for n, B in batches.items())
    return [SampleCall(layer, "dense", n, n, B=B) for n, B in sizes]


def _served(layer: Layer, page: int) -> Iterator[SampleCall]:
    """Ragged queries in pages; once more those of which a caller says how many a sequence has."""
    yield from (SampleCall(layer, "ragged", Sq, n, page=page, B=B) for B, Sq, n in SERVED)
    single = SampleCall(layer, "ragged", 1, SHORT, page=page, max_seqlen_q=1)
    yield from (replace(single, Sq=Sq, Skv=n, B=B) for B, Sq, n in SINGLE)
    draft = MOST_SHORT_ROWS // (layer.Hq // layer.Hkv)
    if draft > 1:
        # Bounds are rounded up to powers of two.
        yield replace(single, max_seqlen_q=1 << draft.bit_length() - 1)


def _decoded(layer: Layer, page: int) -> Iterator[SampleCall]:
    """A few queries against a cache, and chunks; of another sequence's keys, one query."""
    if layer.causal:
        caches = [(n, LONG) for n in (1, DRAFT, LITTLE, REST, CHUNK, PROMPT)] + [(1, SHORT)]
        yield from (SampleCall(layer, "paged", *of, page=page) for of in caches)
        caches = [(1, LONG), (DRAFT, LONG), (DRAFT, PROMPT)]
        yield from (SampleCall(layer, "paged", *of, page=page, B=MANY) for of in caches)
        some = max(1, CUT_HEADS // layer.Hkv)
        yield SampleCall(layer, "paged", 1, LONG, page=page, B=some)
    elif layer.cross and (layer.lengths is None or layer.lengths[0] == 1):
        many = -(-HEADS_OF_IMAGES // layer.Hq)
        sizes = ((SHORT, 1), (LONG, 1), (SHORT, many))
        yield from (SampleCall(layer, "dense", 1, n, B=B) for n, B in sizes)
