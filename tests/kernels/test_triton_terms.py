"""float32 tensors cut into terms of bf16 for the backward."""

from __future__ import annotations

import pytest
import torch
from problems import draw, draw_varlen

pytest.importorskip("triton")
from triton_device import DEVICE, needs_triton

from lockstep.kernels.kernel import BackwardTensors
from lockstep.kernels.triton import backward, terms
from lockstep.kernels.triton.launch import device_of
from lockstep.problem import Options, Tensors, describe

pytestmark = needs_triton
CASES = {
    "dense": lambda: draw(5, 19, B=2, Hq=4, Hkv=2, D=16, Dv=24),
    "odd-dims": lambda: draw(40, 3, Hq=2, Hkv=1, D=33, Dv=5),
    "packed": lambda: draw_varlen([3, 0, 21], [4, 9, 2], Hq=2, Hkv=1, D=20),
}


def terms_of(tensors: Tensors, dout: torch.Tensor) -> dict[str, torch.Tensor]:
    """The terms of q, k, v and dout, by those names: [B, H, S, 3, width]."""
    problem = describe(tensors, Options())
    given = backward.with_aligned_inputs(BackwardTensors(*tensors, dout, dout, dout, None))
    buffers = backward.terms_of(problem, device_of(dout.device))
    made = {name: dout.new_full(x.shape, 7, dtype=x.dtype) for name, x in buffers.items()}
    launch = terms.launch_cut(problem, backward.arguments_of(problem, given))
    launch.run(launch.bind(given._asdict() | made), 0)
    return {name: made[of_terms] for name, of_terms in terms.NAMES.items()}


def by_heads(x: torch.Tensor) -> torch.Tensor:
    """[B, H, S, D] of tensors of either layout."""
    return x if x.dim() == 4 else x.transpose(0, 1)[None]


@pytest.mark.parametrize("name", CASES)
def test_terms_add_up_to_their_tensors(name):
    tensors = Tensors(**{n: x.to(DEVICE) for n, x in CASES[name]().tensors.items()})
    dout = torch.randn(*tensors.q.shape[:-1], tensors.v.shape[-1]).to(DEVICE)
    found = terms_of(tensors, dout)
    for x, cut in zip((*tensors[:3], dout), found.values(), strict=True):
        D = x.shape[-1]
        assert cut.shape[-1] % terms.UNIT == 0
        assert cut[..., D:].eq(0).all()
        assert torch.equal(cut[..., :D].double().sum(-2), by_heads(x).double())


def test_rows_of_queries_have_finite_terms():
    q, k, v, dout = torch.randn(4, 1, 1, 5, 16, device=DEVICE)
    q[..., 3], dout[..., 2] = torch.inf, torch.nan
    found = terms_of(Tensors(q, k, v), dout)
    for x, cut in ((q, found["q"]), (dout, found["dout"])):
        assert torch.equal(cut.double().sum(-2), x.where(x.isfinite(), 0.0).double())


@pytest.mark.gpu
def test_keys_and_values_that_are_not_finite_have_finite_terms_behind_the_first():
    """In NumPy, and so in the interpreter, the smaller of NaN and a number is NaN."""
    q, k, v = torch.randn(3, 1, 1, 5, 16, device=DEVICE)
    k[..., 2], v[..., 1] = -torch.inf, torch.nan
    found = terms_of(Tensors(q, k, v), v)
    for cut in (found["k"], found["v"]):
        assert not cut[..., 0, :].isfinite().all()
        assert cut[..., 1:, :].isfinite().all()
