"""Keys and values that are copied to rows which begin with a sector, before the Hopper forward."""

from __future__ import annotations

import pytest
import torch
from hopper_forward_calls import launch, on_gpu, on_hopper
from launch_arguments import bind
from problems import draw, same_bits, unwritten

from lockstep.kernels.hopper.forward import aligned_rows
from lockstep.kernels.hopper.forward.aligned_rows import MANY_QUERIES, NAMES, aligns
from lockstep.kernels.hopper.forward.launch import forward_launches
from lockstep.problem import Options, describe


def call_of(Sq, Skv, causal=False, **sizes):
    tensors = unwritten(Sq, Skv, **sizes)
    return forward_launches(describe(tensors, Options(causal=causal)), tensors, 132), tensors


def described(call) -> list[str]:
    return call.launches[-1].described()


def test_rows_that_begin_between_sectors_are_copied_where_many_queries_see_them():
    for D, Dv, names in ((72, 72, ["aligned_k", "aligned_v"]), (80, 72, ["k", "aligned_v"])):
        call, _ = call_of(MANY_QUERIES, 300, D=D, Dv=Dv)
        assert described(call) == ["q", *names, "out"]
        copies = [launch for launch in call.launches if launch.name == "align_rows_kernel"]
        assert [launch.tensors() for launch in copies] == [
            [x, y] for x, y in NAMES.items() if y in names
        ]
    few, many = MANY_QUERIES - 1, MANY_QUERIES
    for Sq, D in ((few, 72), (many, 80), (many, 56), (many, 104)):
        call, _ = call_of(Sq, 300, D=D)
        assert described(call) == ["q", "k", "v", "out"]
        assert len(call.launches) == 1


def test_heads_that_share_keys_count_together_and_causal_queries_by_half():
    def problem(Sq, Hq, causal):
        return describe(unwritten(Sq, Sq, Hq=Hq, Hkv=2, D=72), Options(causal=causal))

    assert aligns(problem(MANY_QUERIES // 4, 8, False), 72)
    assert not aligns(problem(MANY_QUERIES // 4, 8, True), 72)
    assert aligns(problem(MANY_QUERIES // 2, 8, True), 72)


@pytest.mark.parametrize("layout", ["heads", "tokens"])
def test_copies_have_rows_of_whole_sectors(layout):
    tensors = unwritten(MANY_QUERIES, 300, B=2, Hq=4, Hkv=2, D=72)
    if layout == "tokens":
        k = torch.empty(2, 300, 2, 72, dtype=torch.bfloat16).transpose(1, 2)
        tensors = tensors._replace(k=k, v=k)
    call = forward_launches(describe(tensors, Options()), tensors, 132)
    _, arguments = bind(call, tensors)["forward_kernel"]
    _, k_map, v_map, _ = arguments[:4]
    for tensor_map in (k_map, v_map):
        assert tensor_map.shape == [1, 2, 2, 300, 72]
        assert tensor_map.strides == [8, 2 * 300 * 80, 300 * 80, 80, 1]


@pytest.mark.parametrize("layout", ["heads", "tokens"])
@pytest.mark.parametrize("causal", [False, True])
class TestOnHopper:
    pytestmark = on_hopper

    def test_a_copy_changes_no_bit(self, monkeypatch, layout, causal):
        case = draw(200, 333, B=2, Hq=4, Hkv=2, D=72, causal=causal, dtype=torch.bfloat16)
        if layout == "tokens":
            for name in "qkv":
                x = case.tensors[name]
                case.tensors[name] = x.transpose(1, 2).contiguous().transpose(1, 2)
        case = on_gpu(case)
        before = launch(case)
        monkeypatch.setattr(aligned_rows, "MANY_QUERIES", 0)
        for _ in range(3):
            after = launch(case)
        assert all(same_bits(x, y) for x, y in zip(before, after, strict=True))
