"""The description of one attention call: every shape, mask and option of it, and nothing of its
data.

`describe` turns the arguments of a call into an `AttentionProblem`, and raises if they do not fit
together. It never looks at a value, so it serves fake tensors and symbolic lengths as well. For a
call that is about to run, `checks` does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from lockstep.numerics import LOG2E, statistics_dtype

# A problem is posed by tensors and options: both can be imported from here.
from lockstep.options import Options as Options
from lockstep.options import Window as Window
from lockstep.options import check_factors, check_options, rounded_bound
from lockstep.options import make_options as make_options

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INDEX_DTYPES = (torch.int32, torch.int64)

_SIZES = ("B", "Hq", "Hkv", "Sq", "Skv", "D", "Dv")
Layout = Literal["dense", "varlen", "paged", "varlen_paged"]


class Tensors(NamedTuple):
    """The tensors of one call. The layout follows from which of them are there."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    sinks: Tensor | None = None
    kv_lens: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    page_table: Tensor | None = None
    kv_starts: Tensor | None = None
    alibi_slopes: Tensor | None = None

    @property
    def layout(self) -> Layout:
        if self.page_table is not None:
            return "paged" if self.cu_seqlens_q is None else "varlen_paged"
        return "dense" if self.cu_seqlens_q is None and self.cu_seqlens_k is None else "varlen"

    def addresses(self) -> list[int]:
        """The addresses of the tensors in order, 0 where there is none."""
        return [0 if x is None else x.data_ptr() for x in self]


@dataclass(frozen=True)
class AttentionProblem:
    """One attention call without its tensors.

    Row `q_idx` of a sequence with `len` keys sits on the diagonal position `q_idx + len - Sq`.
    Packed: `Sq`, and `Skv` unless keys are in pages, is the total of all sequences.
    Paged: `Skv` is what the page table can address, `max_pages * page_size`.
    """

    layout: Layout
    B: int
    Hq: int
    Hkv: int
    Sq: int
    Skv: int
    D: int
    Dv: int
    page_size: int | None
    n_pages: int | None
    dtype: torch.dtype
    device_type: str
    causal: bool
    window_left: int | None
    window_right: int | None
    scale: float
    softcap: float | None
    bias_shape: tuple[int, ...] | None  # 4 sizes, each 1 or that of [B, Hq, Sq, Skv]
    bias_dtype: torch.dtype | None
    has_sinks: bool
    has_kv_lens: bool
    has_kv_starts: bool = False
    has_alibi_slopes: bool = False
    query_invariant: bool = False
    allow_tf32: bool = False  # only with float32
    constant_time: bool = False
    secret_lengths: bool = False  # only with constant_time and kv_lens
    max_seqlen_q: int | None = None  # rounded up, only with ragged queries in pages

    @property
    def window(self) -> Window:
        """Keys seen left and right of the diagonal, None = all; `causal` is folded in."""
        return self.window_left, 0 if self.causal else self.window_right

    @property
    def is_packed(self) -> bool:
        """Whether the queries of all sequences lie one after another: [Tq, Hq, D]."""
        return self.layout in ("varlen", "varlen_paged")

    @property
    def longest_q(self) -> int:
        """No sequence has more queries, or one that does need not be computed."""
        return self.Sq if self.max_seqlen_q is None else self.max_seqlen_q

    @property
    def is_paged(self) -> bool:
        """Whether keys and values are in pages: [n_pages, page, Hkv, D]."""
        return self.layout in ("paged", "varlen_paged")

    @property
    def out_shape(self) -> tuple[int, ...]:
        if self.is_packed:
            return self.Sq, self.Hq, self.Dv
        return self.B, self.Hq, self.Sq, self.Dv

    @property
    def lse_shape(self) -> tuple[int, ...]:
        return self.out_shape[:-1]

    @property
    def has_gradient(self) -> bool:
        """Whether a call can be differentiated: pages are for inference."""
        return not self.is_paged

    @property
    def statistics_shape(self) -> tuple[int, ...]:
        """(m, l) of each row, from which the backward recomputes the weights."""
        return *self.lse_shape, 2

    @property
    def has_raw_scores(self) -> bool:
        """Whether GPU kernels hold scores as products q·k, and scale them in the exponent."""
        is_plain = self.bias_shape is None and not self.has_alibi_slopes
        return is_plain and self.softcap is None and self.scale > 0

    @property
    def score_unit(self) -> float:
        """The factor by which GPU kernels multiply scores, raw or in natural units, to get log2
        units."""
        return self.scale * LOG2E if self.has_raw_scores else LOG2E

    @property
    def lse_dtype(self) -> torch.dtype:
        return statistics_dtype(self.dtype)

    def __str__(self) -> str:
        sizes = " ".join(f"{n}={getattr(self, n)}" for n in _SIZES)
        text = f"{self.layout} {sizes} {short(self.dtype)} on {self.device_type}"
        if self.is_paged:
            text += f", {self.n_pages} pages of {self.page_size}"
        if self.causal:
            text += ", causal"
        if (self.window_left, self.window_right) != (None, None):
            text += f", window=({self.window_left}, {self.window_right})"
        if self.softcap is not None:
            text += f", softcap={self.softcap}"
        if self.bias_shape is not None:
            text += f", bias {list(self.bias_shape)}"
        if self.has_sinks:
            text += ", sinks"
        if self.has_kv_lens and not self.is_paged:
            text += ", kv_lens"
        if self.has_kv_starts:
            text += ", kv_starts"
        if self.has_alibi_slopes:
            text += ", alibi_slopes"
        if self.query_invariant:
            text += ", query_invariant"
        if self.allow_tf32:
            text += ", allow_tf32"
        if self.constant_time:
            text += ", constant_time"
        if self.secret_lengths:
            text += ", secret_lengths"
        if self.max_seqlen_q is not None:
            text += f", max_seqlen_q={self.max_seqlen_q}"
        return text


def pad_bias(bias: Tensor | None) -> Tensor | None:
    """Gives a bias of fewer than 4 dims leading dims of 1, as broadcasting would. What is not a
    tensor with strides stays as it is: `check_types` raises."""
    if bias is not None and isinstance(bias, Tensor) and bias.dim() < 4 and has_strides(bias):
        return bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    return bias


def has_strides(tensor: Tensor) -> bool:
    """Whether a tensor is neither nested nor sparse nor of another layout without strides."""
    return not tensor.is_nested and tensor.layout == torch.strided


# What each argument takes: its dims by name. A name stands for one size throughout a call.
SHAPES: dict[Layout, dict[str, tuple[str, ...]]] = {
    "dense": {
        "q": ("B", "Hq", "Sq", "D"),
        "k": ("B", "Hkv", "Skv", "D"),
        "v": ("B", "Hkv", "Skv", "Dv"),
        "bias": ("B", "Hq", "Sq", "Skv"),
        "sinks": ("Hq",),
        "kv_lens": ("B",),
        "kv_starts": ("B",),
        "alibi_slopes": ("B", "Hq"),
    },
    "varlen": {
        "q": ("Tq", "Hq", "D"),
        "k": ("Tk", "Hkv", "D"),
        "v": ("Tk", "Hkv", "Dv"),
        "sinks": ("Hq",),
        "cu_seqlens_q": ("B + 1",),
        "cu_seqlens_k": ("B + 1",),
        "alibi_slopes": ("B", "Hq"),
    },
    "paged": {
        "q": ("B", "Hq", "Sq", "D"),
        "k": ("n_pages", "page", "Hkv", "D"),
        "v": ("n_pages", "page", "Hkv", "Dv"),
        "page_table": ("B", "max_pages"),
        "bias": ("B", "Hq", "Sq", "Skv"),
        "sinks": ("Hq",),
        "kv_lens": ("B",),
        "kv_starts": ("B",),
        "alibi_slopes": ("B", "Hq"),
    },
    "varlen_paged": {
        "q": ("Tq", "Hq", "D"),
        "k": ("n_pages", "page", "Hkv", "D"),
        "v": ("n_pages", "page", "Hkv", "Dv"),
        "sinks": ("Hq",),
        "cu_seqlens_q": ("B + 1",),
        "page_table": ("B", "max_pages"),
        "kv_lens": ("B",),
        "kv_starts": ("B",),
        "alibi_slopes": ("B", "Hq"),
    },
}
_NEVER_EMPTY = frozenset({"Hq", "Hkv", "D", "Dv", "page", "B + 1"})


def describe(tensors: Tensors, options: Options) -> AttentionProblem:
    """The problem that `tensors` and `options` pose.

    Raises ValueError for shapes, devices and option values that do not fit together, TypeError
    for dtypes. Only sizes that have to be equal are compared, so symbolic lengths stay symbolic.
    """
    layout = tensors.layout
    _check_dtypes_and_devices(tensors, layout)
    check_options(options)
    sizes = _match_shapes(tensors, layout)
    Hq, Hkv, D = sizes["Hq"], sizes["Hkv"], sizes["D"]
    if Hq % Hkv != 0:
        raise ValueError(
            f"q takes a multiple of the heads of {shown('k', layout)}, got Hq = {Hq} and "
            f"Hkv = {Hkv}"
        )
    scale = D**-0.5 if options.scale is None else float(options.scale)
    softcap = None if options.softcap is None else float(options.softcap)
    check_factors(scale, softcap)
    bias = tensors.bias
    if bias is not None and tensors.alibi_slopes is not None:
        raise ValueError("alibi_slopes takes None with a bias, got both: a bias may contain them")
    return AttentionProblem(
        layout=layout,
        B=sizes["B"],
        Hq=Hq,
        Hkv=Hkv,
        Sq=sizes["Sq"] if "Sq" in sizes else sizes["Tq"],
        Skv=sizes["Skv"] if "Skv" in sizes else sizes["Tk"],
        D=D,
        Dv=sizes["Dv"],
        page_size=sizes.get("page"),
        n_pages=sizes.get("n_pages"),
        dtype=tensors.q.dtype,
        device_type=tensors.q.device.type,
        causal=options.causal,
        window_left=options.window_left,
        window_right=options.window_right,
        scale=scale,
        softcap=softcap,
        bias_shape=None if bias is None else tuple(bias.shape),
        bias_dtype=None if bias is None else bias.dtype,
        has_sinks=tensors.sinks is not None,
        has_kv_lens=tensors.kv_lens is not None,
        has_kv_starts=tensors.kv_starts is not None,
        has_alibi_slopes=tensors.alibi_slopes is not None,
        query_invariant=options.query_invariant,
        allow_tf32=options.allow_tf32 and tensors.q.dtype == torch.float32,
        constant_time=options.constant_time,
        secret_lengths=options.secret_lengths and tensors.kv_lens is not None,
        max_seqlen_q=rounded_bound(options.max_seqlen_q) if layout == "varlen_paged" else None,
    )


def _match_shapes(tensors: Tensors, layout: Layout) -> dict[str, int]:
    """Binds the names in SHAPES to sizes, in the order of that table."""
    sizes: dict[str, int] = {}
    for name, dims in SHAPES[layout].items():
        tensor = getattr(tensors, name)
        if tensor is None:
            continue
        shape = tensor.shape
        if name == "alibi_slopes" and len(shape) == 1:
            # The same for all sequences.
            dims = dims[1:]
        if len(shape) != len(dims):
            raise ValueError(
                f"{shown(name, layout)} takes shape [{', '.join(dims)}], got {len(shape)} dims: "
                f"{list(shape)}"
            )
        for dim, size in zip(dims, shape, strict=True):
            # Only the bias broadcasts.
            if sizes.setdefault(dim, size) != size and not (name == "bias" and size == 1):
                raise ValueError(
                    f"{shown(name, layout)} takes shape [{', '.join(dims)}] with {dim} = "
                    f"{sizes[dim]}, got {list(shape)}"
                )
            if dim in _NEVER_EMPTY and size < 1:
                raise ValueError(
                    f"{shown(name, layout)} takes shape [{', '.join(dims)}] with {dim} at least "
                    f"1, got {list(shape)}"
                )
        if name == "cu_seqlens_q":
            sizes["B"] = sizes["B + 1"] - 1
        elif name == "page_table":
            sizes["Skv"] = sizes["max_pages"] * sizes["page"]
    return sizes


def _check_dtypes_and_devices(tensors: Tensors, layout: Layout) -> None:
    q = tensors.q
    dtype, device = q.dtype, q.device
    if dtype not in DTYPES:
        raise TypeError(f"q takes {any_of(DTYPES)}, got {short(dtype)}")
    for name, tensor in zip(tensors._fields, tensors, strict=True):
        if tensor is None:
            continue
        if tensor.device != device:
            raise ValueError(
                f"{shown(name, layout)} takes the device of q, {device}, got {tensor.device}"
            )
        takes: tuple[torch.dtype, ...] = (dtype,)
        if name in ("bias", "sinks", "alibi_slopes"):
            takes = (dtype,) if dtype == torch.float32 else (dtype, torch.float32)
        elif name not in ("q", "k", "v"):
            takes = INDEX_DTYPES
        if tensor.dtype not in takes:
            why = "" if takes is INDEX_DTYPES else f" with q in {short(dtype)}"
            raise TypeError(
                f"{shown(name, layout)} takes {any_of(takes)}{why}, got {short(tensor.dtype)}"
            )


def shown(name: str, layout: Layout) -> str:
    """The name by which the caller knows an argument."""
    return f"{name}_pages" if layout == "paged" and name in ("k", "v") else name


def short(dtype: torch.dtype | torch.layout) -> str:
    return str(dtype).removeprefix("torch.")


def any_of(dtypes: tuple[torch.dtype, ...]) -> str:
    return " or ".join(short(dtype) for dtype in dtypes)
