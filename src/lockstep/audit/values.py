"""The distributions that tests and audits draw numbers from, as data.

An expression is Python source over `torch`, in which `{shape}` stands for the sizes of a tensor,
`{tiny}` for the smallest normal number of its dtype and `{lowest}` for its most negative one. A
problem is drawn from it, and printed with it, so that a reader can draw it again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
SINGLE = (torch.float32,)
DTYPES = SINGLE + HALF

NORMAL = "torch.randn({shape})"
# Neighbours along a row, or rows that follow each other, have opposite signs.
_BY_ELEMENT = "torch.randn({shape}).abs() * (1 - 2 * (torch.arange({shape}[-1]) % 2))"
_BY_ROW = (
    "torch.randn({shape}).abs() "
    "* (1 - 2 * (torch.arange(math.prod({shape}[:-1])) % 2)).view(*{shape}[:-1], 1)"
)
# Some keys score so high with every query that they get all of the weight.
_DOMINANT = "torch.randn({shape}) + 20 * (torch.rand(*{shape}[:-1], 1) < 0.02)"


@dataclass(frozen=True)
class Values:
    """The numbers of q, k and v, the dtypes that can hold them, and what a call takes with them.

    Where all rows come out `alike`, their gradients should not: errors that repeat from row to row
    do not average out, as the error rule takes them to.
    """

    name: str
    q: str = NORMAL
    k: str = NORMAL
    v: str = NORMAL
    dtypes: tuple[torch.dtype, ...] = DTYPES
    options: dict[str, Any] = field(default_factory=dict)
    alike: bool = False


def _normal(sigma: float, dtypes: tuple[torch.dtype, ...] = DTYPES) -> Values:
    drawn = f"{sigma} * {NORMAL}"
    return Values(f"normal, sigma {sigma:g}", drawn, drawn, dtypes=dtypes)


# Sigma is that of q and k: scores have a standard deviation of about its square.
VALUES = (
    Values("normal"),
    *(_normal(sigma) for sigma in (3.0, 10.0, 30.0)),
    *(_normal(sigma, SINGLE) for sigma in (0.1, 100.0, 1e3)),
    Values("constant rows", NORMAL, *2 * ("torch.randn({shape}[-1]).expand({shape})",), alike=True),
    Values("one dominant key", q="1 + torch.randn({shape})", k=_DOMINANT),
    Values("integers", *3 * ("torch.randint(-4, 5, {shape}).float()",), options={"scale": 1.0}),
    Values("alternating signs", _BY_ELEMENT, _BY_ELEMENT, _BY_ROW),
    Values("subnormal values", v="{tiny} * torch.randn({shape})"),
    Values("subnormal", *3 * ("{tiny} * torch.randn({shape})",), alike=True),
    Values("zeros", k="torch.zeros({shape})", alike=True),
)

_ROWS = "(torch.rand(*{shape}[:-1], 1) < 0.3)"
_KEYS = "(torch.rand(1, 1, 1, {shape}[-1]) < 0.3)"
BIASES = {
    "normal": NORMAL,
    "minus infinity": "torch.zeros({shape}).masked_fill(torch.rand({shape}) < 0.3, -torch.inf)",
    # Finite numbers that many models use for minus infinity: for some keys, and for all keys of
    # some rows.
    **{
        f"{name} over {where}": f"torch.zeros({{shape}}) + {value} * {mask}"
        for name, value in (*((x, x) for x in ("-1e4", "-1e9", "-1e30")), ("lowest", "{lowest}"))
        for where, mask in (("keys", _KEYS), ("rows", _ROWS))
    },
}


def source(expression: str, shape: tuple[int, ...], dtype: torch.dtype) -> str:
    """The expression for one tensor, ready to be evaluated.

    Example:
        >>> source("{tiny} * torch.randn({shape})", (2, 3), torch.float16)
        '6.103515625e-05 * torch.randn((2, 3))'
    """
    info = torch.finfo(dtype)
    texts = {"{shape}": str(tuple(shape)), "{tiny}": str(info.tiny), "{lowest}": str(info.min)}
    for name, text in texts.items():
        expression = expression.replace(name, text)
    return expression


def draw(expression: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor drawn from an expression with torch's own generator."""
    drawn: Tensor = evaluate(source(expression, shape, dtype))
    return drawn.to(dtype)


def evaluate(text: str) -> Any:
    """The value of an expression over `torch` and `math`."""
    import math

    return eval(text, {"torch": torch, "math": math})
