"""Drawn problems on a GPU: shapes and lengths from hypothesis, results held to the oracle.

What a kernel is compiled for (head dims, dtype, layout, which options are present) comes from a few
kinds; everything else is drawn. So each kind compiles once and then runs many problems.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import problems
import pytest
import repeatable_draws  # noqa: F401
import torch
from hypothesis import given, settings

from lockstep.audit import values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Draw = Callable[[st.SearchStrategy[Any]], Any]
# Around the edges of tiles as often as anywhere else.
LENGTHS = st.one_of(st.integers(1, 700), st.sampled_from([1, 16, 63, 64, 65, 127, 128, 129, 512]))


def numbers_of(dtype: torch.dtype) -> st.SearchStrategy[str]:
    return st.sampled_from([x.name for x in problems.VALUES.values() if dtype in x.dtypes])


def dense(draw: Draw, *, group: int = 1, optional: tuple[str, ...] = (), **fixed: Any):
    B, Hkv, Sq, Skv = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(LENGTHS), draw(LENGTHS)
    more = drawn_options(draw, optional, (B, Hkv * group, Sq, Skv))
    numbers = draw(numbers_of(fixed["dtype"]))
    sizes = {"B": B, "Hq": Hkv * group, "Hkv": Hkv}
    return problems.draw(Sq, Skv, **sizes, numbers=numbers, **{**fixed, **more})


def packed(draw: Draw, *, group: int = 1, optional: tuple[str, ...] = (), **fixed: Any):
    Hkv, n = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    lens = [draw(st.lists(st.integers(0, 400), min_size=n, max_size=n)) for _ in range(2)]
    # A packed batch has at least one token.
    lens[0][0], lens[1][-1] = lens[0][0] + 1, lens[1][-1] + 1
    more = drawn_options(draw, optional, (1, Hkv * group, 1, 1))
    return problems.draw_varlen(*lens, Hq=Hkv * group, Hkv=Hkv, **fixed, **more)


def paged(draw: Draw, *, page_size: int, **fixed: Any):
    return problems.paginate(dense(draw, **fixed), page_size, garbage=float("nan"))


def drawn_options(draw: Draw, names: tuple[str, ...], sizes: tuple[int, ...]) -> dict[str, Any]:
    B, Hq, Sq, Skv = sizes
    reach = st.integers(0, 200)
    drawn: dict[str, Callable[[], Any]] = {
        "window": lambda: (draw(reach), draw(reach)),
        "softcap": lambda: draw(st.floats(0.5, 50.0)),
        "scale": lambda: draw(st.floats(0.01, 0.5)),
        "sinks": lambda: torch.randn(Hq),
        "kv_lens": lambda: torch.tensor([draw(st.integers(0, Skv)) for _ in range(B)]),
        "bias": lambda: values.draw(
            values.BIASES[draw(st.sampled_from(sorted(values.BIASES)))],
            (B, Hq, Sq, Skv),
            torch.float32,
        ),
    }
    return {name: drawn[name]() for name in names}


KINDS: dict[str, Callable[[Draw], problems.Case]] = {
    "causal, four heads to one": lambda draw: dense(
        draw, D=128, dtype=BF16, group=4, causal=True, optional=("scale",)
    ),
    "window, softcap, sinks": lambda draw: dense(
        draw, D=64, dtype=BF16, optional=("window", "softcap", "sinks")
    ),
    "lengths": lambda draw: dense(
        draw, D=128, dtype=F16, group=2, causal=True, optional=("kv_lens",)
    ),
    "bias, D 33, Dv 80": lambda draw: dense(draw, D=33, Dv=80, dtype=F32, optional=("bias",)),
    "packed, causal": lambda draw: packed(
        draw, D=128, dtype=BF16, group=2, causal=True, optional=("sinks",)
    ),
    "pages of 16": lambda draw: paged(
        draw, page_size=16, D=128, dtype=BF16, group=8, causal=True, optional=("kv_lens",)
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_drawn_problems_agree_with_the_oracle(kind):
    @settings(max_examples=40, deadline=None, derandomize=True, database=None)
    @given(st.data())
    def holds(data):
        torch.manual_seed(data.draw(st.integers(0, 2**16)))
        case = KINDS[kind](data.draw)
        case = problems.Case({n: x.cuda() for n, x in case.tensors.items()}, case.options)
        with torch.device("cuda"):
            problems.assert_all_exact(case)

    holds()
