"""Options of a Hopper call that are seldom together: kernels up to Triton's first text.

What a kernel does with an option is compiled only where the option is, so a slip in it shows where
two of them meet. To find it needs no code for a GPU: a text takes two seconds, a build ten.
"""

from __future__ import annotations

import pytest
import torch
from problems import draw_varlen, unwritten

pytest.importorskip("triton.experimental.gluon.language.nvidia.hopper")

from launch_arguments import Bound, bind, source_of
from triton._C.libtriton import ir

from lockstep.kernels.hopper.forward.launch import forward_launches
from lockstep.problem import Options, Tensors, describe

LENGTHS = torch.tensor([5, 300], dtype=torch.int32)
LEFT = {"causal": True, "window_left": 600}
BOTH = {"window_left": 90, "window_right": 20}
CASES = {
    "one loop": (64, "dense", {"causal": True, "query_invariant": True}, 600),
    "two loops": (64, "dense", {"causal": True, "query_invariant": True}, 3000),
    "wide": (128, "dense", {"query_invariant": True}, 3000),
    "window": (128, "dense", {**BOTH, "query_invariant": True}, 3000),
    "lengths": (64, "kv_lens", {**LEFT, "query_invariant": True}, 3000),
    "packed": (128, "varlen", {"causal": True, "query_invariant": True}, 300),
    "constant time": (128, "kv_lens", {**LEFT, "constant_time": True}, 3000),
    "softcap, packed": (256, "varlen", {"causal": True, "softcap": 30.0}, 300),
    "softcap, window": (128, "kv_lens", {**BOTH, "softcap": 30.0}, 3000),
}


def tensors_of(layout: str, D: int, S: int) -> Tensors:
    """A call with sinks, of two sequences."""
    sinks = torch.empty(4)
    if layout == "varlen":
        case = draw_varlen([S, 7], [S, 9], Hq=4, Hkv=2, D=D, dtype=torch.bfloat16)
        return Tensors(**case.tensors)._replace(sinks=sinks)
    lengths = LENGTHS if layout == "kv_lens" else None
    return unwritten(S, S, B=2, Hq=4, Hkv=2, D=D, sinks=sinks, kv_lens=lengths)


def first_text(bound: Bound) -> str:
    """What Triton makes of a kernel of Gluon before it looks for anything to improve."""
    launch = bound.launch
    source, backend, options = source_of(launch.kernel, bound.arguments, launch.options, 90)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions, modules = backend.get_codegen_implementation(options), backend.get_module_map()
    return str(source.make_ir(backend.target, options, functions, modules, context))


@pytest.mark.parametrize("case", CASES)
def test_sinks_go_with_every_other_option(case):
    D, layout, options, S = CASES[case]
    tensors = tensors_of(layout, D, S)
    call = forward_launches(describe(tensors, Options(**options)), tensors, 132)
    bound = bind(call, tensors)["forward_kernel"]
    assert bound.launch.kernel.__name__ in first_text(bound)
