"""Random attention problems, drawn as the lines of Python that make them.

What an audit runs is what it prints: `Recipe.build` executes the lines that `Recipe.snippet` shows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from lockstep.audit.cases import Case, Douts
from lockstep.audit.values import BIASES, DTYPES, NORMAL, VALUES, Values, source
from lockstep.problem import Layout, Tensors

LAYOUTS: tuple[Layout, ...] = ("dense", "dense", "varlen", "paged", "varlen_paged")
LENGTHS = (1, 2, 17, 63, 64, 65, 111, 127, 128, 129, 256, 257, 300, 1023)
HEAD_DIMS = {
    "cpu": (1, 2, 5, 8, 16, 33, 64, 72, 80, 111, 128, 200, 256),
    "cuda": (8, 33, 40, 64, 64, 72, 80, 96, 128, 128, 160, 192, 256),
}
# A GPU kernel is compiled for layout, dtype, head dims and options: so many problems in a row share
# these.
PER_KIND = {"cpu": 1, "cuda": 8}
LONGEST = {"cpu": 400, "cuda": 4200}
PAGE_SIZES = (1, 7, 16, 64)
SIDES = (None, 0, 1, 17, 100)
# Scores of a problem at most: the oracle holds all of them, many times over.
MOST_SCORES = {"cpu": 60_000, "cuda": 3_000_000}
LONG = 6000

# Other places for the same numbers: views of larger tensors, and an address off by one element.
_STORAGES = {
    "in place": "",
    "heads and rows exchanged": "{x} = {x}.transpose(-3, -2).contiguous().transpose(-3, -2)",
    "part of wider rows": "{x} = torch.cat([{x}, {x}], -1)[..., : {x}.shape[-1]]",
    "every other row": "{x} = {x}.repeat_interleave(2, -2)[..., ::2, :]",
    "every other column": "{x} = {x}.repeat_interleave(2, -1)[..., ::2]",
    "off by one element": "{x} = torch.cat([{x}.flatten()[:1], {x}.flatten()])[1:].view({x}.shape)",
    "the first for all": "{x} = {x}[:1].expand({x}.shape)",
}
_BIAS_STORAGES = {
    "in place": "",
    "rows and keys exchanged": "bias = bias.mT.contiguous().mT",
    "every other key": "bias = bias.repeat_interleave(2, -1)[..., ::2]",
    "expanded": "bias = bias.expand({whole})",
}
_DOUTS = {
    "normal": NORMAL,
    "ones": "torch.ones(()).expand({shape})",
    "zeros": "torch.zeros({shape})",
    "some rows 0": "torch.randn({shape}) * (torch.rand(*{shape}[:-1], 1) < 0.5)",
}


@dataclass(frozen=True)
class Recipe:
    """One problem: the lines that make its tensors, its options, and what kinds it belongs to."""

    lines: tuple[str, ...]
    options: dict[str, Any]
    kinds: tuple[str, ...]
    memory: bool = False  # so long that a matrix of scores would show

    def build(self) -> tuple[Case, Douts | None]:
        """The call, and gradients that come into its backward where there are some."""
        made: dict[str, Any] = {}
        exec("\n".join(("import math, torch", *self.lines)), made)
        tensors = {name: made[name] for name in Tensors._fields if name in made}
        douts = (made["dout"], made["dlse"]) if "dout" in made else None
        return Case(tensors, dict(self.options)), douts

    def snippet(self, check: str, kernel: str) -> str:
        """A program that makes the same tensors and runs one check on them."""
        names = [line.split(" = ")[0] for line in self.lines]
        tensors = [name for name in Tensors._fields if name in names]
        given = ", ".join(f'"{name}": {name}' for name in tensors)
        douts = "(dout, dlse)" if "dout" in names else "None"
        return "\n".join(
            (
                "import math, torch",
                "from lockstep.audit.cases import Case",
                f"from lockstep.audit.exact_checks import {check}",
                *self.lines,
                f"case = Case({{{given}}}, {self.options!r})",
                f'print({check}(case, {douts}, "{kernel}"))',
            )
        )


class Drawing:
    """A problem in the making: what has been drawn of it so far."""

    def __init__(self, kind: Random, rng: Random, device: str) -> None:
        """`kind` draws what problems of one kind share, `rng` all else."""
        self.kind, self.rng, self.device = kind, rng, device
        self.lines = [f"torch.manual_seed({rng.randrange(2**31)})"]
        self.options: dict[str, Any] = {}
        self.kinds: list[str] = []
        self.dtype = kind.choice(DTYPES)
        self.values: Values = rng.choice([x for x in VALUES if self.dtype in x.dtypes])
        self.options |= self.values.options
        self.kinds += [f"values: {self.values.name}", f"dtype: {str(self.dtype)[6:]}"]
        dims = HEAD_DIMS[device]
        self.D = kind.choice(dims)
        self.Dv = self.D if kind.random() < 0.6 else kind.choice(dims)
        self.Hkv, group = rng.choice((1, 1, 2, 3)), rng.choice((1, 1, 2, 4))
        self.Hq = self.Hkv * group

    def tensor(
        self, name: str, expression: str, shape: tuple[int, ...], dtype: torch.dtype
    ) -> None:
        text = source(expression, shape, dtype)
        on_device = "" if self.device == "cpu" else f'.to("{self.device}")'
        self.lines.append(f"{name} = ({text}).to({dtype}){on_device}")

    def integers(self, name: str, text: str) -> None:
        dtype = self.rng.choice((torch.int32, torch.int64))
        self.lines.append(f'{name} = {text}.to({dtype}).to("{self.device}")')

    def stored(self, storages: dict[str, str], **names: Any) -> str:
        """Moves a tensor to one of the places it could be in; half of them stay."""
        kind = "in place" if self.rng.random() < 0.5 else self.rng.choice(list(storages))
        if storages[kind]:
            self.lines.append(storages[kind].format(**names))
        return kind

    def inputs(self, shapes: dict[str, tuple[int, ...]]) -> None:
        for name, shape in shapes.items():
            self.tensor(name, getattr(self.values, name), shape, self.dtype)
            # Packed tokens that are all the same would have errors that are all the same, too.
            kept = dict(_STORAGES) if len(shape) == 4 else {**_STORAGES, "the first for all": ""}
            kind = self.stored(kept, x=name)
            if kind != "in place":
                self.kinds.append(f"storage: {kind}")

    def common_options(self) -> None:
        rng, options = self.kind, self.options
        if rng.random() < 0.4:
            options["causal"] = True
        if rng.random() < 0.3:
            right = 0 if "causal" in options else rng.choice(SIDES)
            options["window"] = (rng.choice(SIDES), right)
        if rng.random() < 0.2:
            options["softcap"] = rng.choice((0.5, 5.0, 50.0))
        if rng.random() < 0.2:
            options["scale"] = rng.choice((1.0, 0.3, -0.1, 0.0))
        if rng.random() < 0.2:
            options["query_invariant"] = True
        self.kinds += [f"option: {name}" for name in options]
        if rng.random() < 0.25:
            self.tensor("sinks", NORMAL, (self.Hq,), rng.choice((self.dtype, torch.float32)))
            self.kinds.append("option: sinks")

    def bias(self, B: int, Sq: int, Skv: int) -> None:
        rng, whole = self.rng, (B, self.Hq, Sq, Skv)
        if rng.random() > 0.35:
            return
        dtype = rng.choice((self.dtype, torch.float32))
        names = [n for n in BIASES if dtype != torch.float16 or not n.startswith(("-1e9", "-1e30"))]
        name = rng.choice(names)
        shape = tuple(size if rng.random() < 0.6 else 1 for size in whole)
        self.tensor("bias", BIASES[name], shape, dtype)
        storage = self.stored(_BIAS_STORAGES, whole=whole)
        self.kinds += [f"bias: {name}", f"bias storage: {storage}"]

    def slopes(self, B: int) -> None:
        """ALiBi, where there is no bias."""
        rng = self.rng
        if rng.random() > 0.15 or any(line.startswith("bias =") for line in self.lines):
            return
        shape = (self.Hq,) if rng.random() < 0.5 else (B, self.Hq)
        slopes = "2.0 ** -torch.randint(0, 9, {shape})"
        self.tensor("alibi_slopes", slopes, shape, rng.choice((self.dtype, torch.float32)))
        self.kinds.append("option: alibi_slopes")

    def starts(self, ends: list[int]) -> None:
        """First keys of sequences that end where they do."""
        if self.rng.random() < 0.2:
            firsts = [self.rng.randint(0, end) for end in ends]
            self.integers("kv_starts", f"torch.tensor({firsts})")
            self.kinds.append("option: kv_starts")

    def douts(self, out_shape: tuple[int, ...]) -> None:
        if self.rng.random() < 0.25:
            return
        alike = self.values.alike or self.options.get("scale") == 0.0
        kinds = [x for x in _DOUTS if not (x == "ones" and alike)]
        kind = self.rng.choice(kinds)
        self.tensor("dout", _DOUTS[kind], out_shape, self.dtype)
        dlse = self.rng.choice((NORMAL, "torch.zeros({shape})"))
        self.tensor("dlse", dlse, out_shape[:-1], torch.float32)
        self.kinds += ["gradients", f"dout: {kind}"]

    def recipe(self, memory: bool = False) -> Recipe:
        return Recipe(tuple(self.lines), self.options, tuple(dict.fromkeys(self.kinds)), memory)


def draw(seed: int, number: int, device: str) -> Recipe:
    """Problem `number` of a run with this seed."""
    kind, rng = Random(f"{seed}:{number // PER_KIND[device]}:kind"), Random(f"{seed}:{number}")
    drawing = Drawing(kind, rng, device)
    if rng.random() < 0.01:
        return _long(drawing)
    layout = kind.choice(LAYOUTS)
    drawing.kinds.insert(0, f"layout: {layout}")
    _DRAW[layout](drawing)
    return drawing.recipe()


def _length(rng: Random, longest: int) -> int:
    return rng.choice(LENGTHS) if rng.random() < 0.6 else rng.randint(1, longest)


def _lengths(drawing: Drawing, B: int) -> tuple[int, int]:
    """Sq and Skv whose scores the oracle can hold."""
    rng, longest = drawing.rng, LONGEST[drawing.device]
    while True:
        Sq, Skv = _length(rng, longest), _length(rng, longest)
        if B * drawing.Hq * Sq * Skv <= MOST_SCORES[drawing.device]:
            return Sq, Skv


def _dense(d: Drawing) -> None:
    B = d.rng.choice((1, 1, 2, 3))
    Sq, Skv = _lengths(d, B)
    d.inputs(
        {
            "q": (B, d.Hq, Sq, d.D),
            "k": (B, d.Hkv, Skv, d.D),
            "v": (B, d.Hkv, Skv, d.Dv),
        }
    )
    d.common_options()
    d.bias(B, Sq, Skv)
    ends = [Skv] * B
    if d.rng.random() < 0.3:
        ends = [d.rng.randint(0, Skv) for _ in range(B)]
        d.integers("kv_lens", f"torch.tensor({ends})")
        d.kinds.append("option: kv_lens")
    d.starts(ends)
    d.slopes(B)
    d.douts((B, d.Hq, Sq, d.Dv))


def _varlen(d: Drawing) -> None:
    sides: list[list[int]] = [[], []]
    for _ in range(d.rng.randint(1, 4)):
        Sq, Skv = _lengths(d, 2)
        empty = d.rng.random() < 0.15
        sides[0].append(0 if empty and d.rng.random() < 0.5 else Sq)
        sides[1].append(0 if empty else Skv)
    # A packed batch has at least one token.
    for side in sides:
        side[-1] = max(side[-1], 1)
    Tq, Tk = (sum(side) for side in sides)
    d.inputs({"q": (Tq, d.Hq, d.D), "k": (Tk, d.Hkv, d.D), "v": (Tk, d.Hkv, d.Dv)})
    for name, side in zip(("cu_seqlens_q", "cu_seqlens_k"), sides, strict=True):
        offsets = [sum(side[:i]) for i in range(len(side) + 1)]
        d.integers(name, f"torch.tensor({offsets})")
    d.common_options()
    d.slopes(len(sides[0]))
    d.douts((Tq, d.Hq, d.Dv))


def _paged(d: Drawing) -> None:
    B, page = d.rng.choice((1, 2, 3)), d.rng.choice(PAGE_SIZES)
    Sq, Skv = _lengths(d, B)
    pages = math.ceil(Skv / page)
    n_pages = B * pages + 2
    d.tensor("q", d.values.q, (B, d.Hq, Sq, d.D), d.dtype)
    d.inputs({"k": (n_pages, page, d.Hkv, d.D), "v": (n_pages, page, d.Hkv, d.Dv)})
    d.integers("page_table", f"torch.randperm({n_pages})[:{B * pages}].view({B}, {pages})")
    ends = [d.rng.randint(0, Skv) for _ in range(B)]
    d.integers("kv_lens", f"torch.tensor({ends})")
    d.common_options()
    d.bias(B, Sq, pages * page)
    d.starts(ends)
    d.slopes(B)


def _varlen_paged(d: Drawing) -> None:
    B, page = d.rng.choice((1, 2, 3)), d.rng.choice(PAGE_SIZES)
    sides = [_lengths(d, B) for _ in range(B)]
    pages = math.ceil(max(Skv for _, Skv in sides) / page)
    n_pages = B * pages + 2
    offsets = [sum(Sq for Sq, _ in sides[:b]) for b in range(B + 1)]
    d.inputs({"q": (offsets[-1], d.Hq, d.D)})
    d.inputs({"k": (n_pages, page, d.Hkv, d.D), "v": (n_pages, page, d.Hkv, d.Dv)})
    d.integers("cu_seqlens_q", f"torch.tensor({offsets})")
    d.integers("page_table", f"torch.randperm({n_pages})[:{B * pages}].view({B}, {pages})")
    ends = [Skv for _, Skv in sides]
    d.integers("kv_lens", f"torch.tensor({ends})")
    d.common_options()
    d.starts(ends)
    d.slopes(B)


_DRAW = {"dense": _dense, "varlen": _varlen, "paged": _paged, "varlen_paged": _varlen_paged}


def _long(d: Drawing) -> Recipe:
    """One head whose matrix of scores would be many times as large as its tensors."""
    d.D = d.Dv = 8
    d.kinds = ["long"]
    d.inputs(dict.fromkeys(("q", "k", "v"), (1, 1, LONG, 8)))
    if d.rng.random() < 0.5:
        d.options["causal"] = True
    d.tensor("dout", NORMAL, (1, 1, LONG, 8), d.dtype)
    d.tensor("dlse", NORMAL, (1, 1, LONG), torch.float32)
    return d.recipe(memory=True)
