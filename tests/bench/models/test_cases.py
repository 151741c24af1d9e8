"""The suite of models: its data, and every case of it in little, checked on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from scaled_down import scaled_down

from lockstep.bench.models import cases, inputs, measure
from lockstep.bench.models.contender import NAME, Contender, call_of, ours
from lockstep.bench.models.packing import pack, window_of
from lockstep.kernels import hopper, triton
from lockstep.kernels.hopper.common import requirements
from lockstep.models import MODELS
from lockstep.problem import describe

CASES = cases.CASES


def meta_problem(case):
    """The problem of a case at its full size, of tensors without data."""
    made = inputs.make(case, "meta")
    return replace(describe(made.tensors, case.shape.options), device_type="cuda")


def test_names_are_unique_and_every_kind_and_model_has_a_case():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert {case.kind for case in CASES} == set(cases.KINDS)
    assert {case.model for case in CASES} == set(MODELS)


def test_the_suite_has_the_work_that_serving_and_training_bring():
    assert {case.page for case in CASES if case.kind == "decode"} == {16, 64, 256}
    verified = {case.Sq for case in CASES if case.work == "speculative decode"}
    assert verified <= set(range(2, 9))
    assert len(verified) >= 3
    assert any(case.long_tailed for case in CASES if case.kind == "decode")
    for kind in ("forward", "backward"):
        assert any(case.packed for case in CASES if case.kind == kind)
    assert any(case.Sq < case.keys for case in CASES if case.work == "chunked prefill")
    # Gradients of sinks are summed over the batch: only one sequence can be checked by itself.
    assert all(case.B == 1 for case in CASES if case.kind == "backward" and case.shape.sinks)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_for_gpus_takes_every_case_at_its_full_size(case, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(requirements, "_capability", lambda device: (9, 0))
    monkeypatch.setattr(triton, "_capability", lambda device: (9, 0), raising=False)
    problem = meta_problem(case)
    kernels = (hopper.KERNEL, triton.KERNEL)
    assert any(kernel.supports(problem) is None for kernel in kernels)
    assert inputs.amount(case) > 0


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_case_in_little_holds_the_error_rule(case, monkeypatch):
    torch.manual_seed(0)
    little = scaled_down(case)
    row, calls = measure.admitted(little, ours(), "cpu")
    assert list(calls) == [NAME], row.failed
    assert row.errors[NAME] <= 1
    assert row.chosen in ("amx", "cpu")


def test_a_batch_with_sinks_is_right():
    (case,) = (case for case in CASES if case.name == "gpt-oss local, training 4k")
    row, calls = measure.admitted(replace(scaled_down(case), B=2), ours(), "cpu")
    assert list(calls) == [NAME], row.failed


def test_a_wrong_result_has_no_time():
    case = scaled_down(CASES[0])

    def off_by_one_row(made):
        right = ours()[0].prepare(made)
        return lambda: right().roll(1, dims=-2)

    row, calls = measure.admitted(case, [Contender("wrong", off_by_one_row)], "cpu")
    assert calls == {}
    assert row.failed["wrong"].startswith("WrongResult: out is off by")


def test_rows_of_a_piece_see_what_they_see_in_the_whole(monkeypatch):
    monkeypatch.setattr(inputs, "ROWS", 16)
    for name in ("Llama 3 8B, chunked prefill 2k to 32k keys", "gpt-oss local, prefill 8k"):
        (case,) = (case for case in CASES if case.name == name)
        made = inputs.make(scaled_down(case), "cpu")
        parts = inputs.pieces(made)
        result = call_of(ours()[0], made)()
        assert inputs.largest_error(made, parts, inputs.expect(made, parts), result) <= 1
        assert {piece.rows.start for piece in parts} == {0, 12, 24}


@pytest.mark.parametrize(
    ("name", "pairs"),
    [
        ("Llama 3 8B, prefill 8k", 8192 * 8193 // 2),
        ("gpt-oss local, prefill 8k", 8192 * 128 - 8128),
    ],
)
def test_work_is_what_the_mask_shows(name, pairs):
    (case,) = (case for case in CASES if case.name == name)
    assert inputs.amount(case) == pytest.approx(4e-9 * pairs * case.shape.Hq * case.shape.D)


def test_a_decode_reads_what_its_window_shows():
    (case,) = (case for case in CASES if case.name.startswith("gpt-oss local, decode"))
    assert inputs.amount(case) == pytest.approx(64 * 128 * 8 * 64 * 2 * 2 / 1e6)


def test_dense_inputs_are_packed_without_a_copy():
    (case,) = (case for case in CASES if case.name.startswith("Whisper large v3 cross"))
    made = inputs.make(scaled_down(case), "cpu")
    packed = pack(made)
    assert packed.q.data_ptr() == made.tensors.q.data_ptr()
    assert packed.k.data_ptr() == made.tensors.k.data_ptr()
    assert torch.equal(packed.unpack(packed.q), made.tensors.q)
    assert packed.cu_seqlens_k.tolist() == [0, 40, 80, 120]


@pytest.mark.parametrize(
    ("name", "window"),
    [
        ("Llama 3 8B, prefill 8k", (-1, 0)),
        ("gpt-oss local, prefill 8k", (127, 0)),
        ("BERT large, encode 32 × 512", (-1, -1)),
        ("ModernBERT base local, packed 16 × 1k long-tailed", (64, 64)),
    ],
)
def test_windows_of_the_peers(name, window):
    (case,) = (case for case in CASES if case.name == name)
    assert window_of(inputs.make(scaled_down(case), "meta"), -1) == window
