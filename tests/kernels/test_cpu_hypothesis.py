"""Options and shapes drawn by hypothesis, held against the oracle."""

from __future__ import annotations

import hypothesis.strategies as st
import problems
import repeatable_draws  # noqa: F401
import torch
from hypothesis import HealthCheck, given, settings

from lockstep.audit import values
from lockstep.audit.values import BIASES

SIDES = st.sampled_from([None, 0, 1, 17, 100])


@st.composite
def cases(draw) -> problems.Case:
    torch.manual_seed(draw(st.integers(0, 2**16)))
    B, Hkv, G = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    Sq, Skv = draw(st.integers(1, 70)), draw(st.integers(0, 300))
    D, Dv = draw(st.integers(1, 150)), draw(st.integers(1, 80))
    dtype = draw(st.sampled_from(problems.DTYPES))
    fits = [x.name for x in problems.VALUES.values() if dtype in x.dtypes]
    causal, more = draw(st.booleans()), {"numbers": draw(st.sampled_from(fits))}
    if draw(st.booleans()):
        more["window"] = (draw(SIDES), 0 if causal else draw(SIDES))
    if draw(st.booleans()):
        more["softcap"] = draw(st.sampled_from([0.5, 5.0, 50.0]))
    if draw(st.booleans()):
        more["sinks"] = torch.randn(Hkv * G)
    if draw(st.booleans()):
        lens = st.lists(st.integers(0, Skv), min_size=B, max_size=B)
        more["kv_lens"] = torch.tensor(draw(lens))
    if draw(st.booleans()):
        whole = (B, Hkv * G, Sq, Skv)
        shape = [size if draw(st.booleans()) else 1 for size in whole]
        kind = draw(st.sampled_from(sorted(BIASES)))
        more["bias"] = values.draw(BIASES[kind], shape, torch.float32)
    return problems.draw(
        Sq, Skv, B=B, Hq=Hkv * G, Hkv=Hkv, D=D, Dv=Dv, dtype=dtype, causal=causal, **more
    )


@settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(cases())
def test_drawn_problems_agree_with_the_oracle(case):
    problems.assert_all_exact(case)
