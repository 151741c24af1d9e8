"""Every rung: right on the machine, free of hazards, and data-oblivious where it says so."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from lockstep.ladder import RUNGS, Problem, check, find, launches_of, run_on_gpu, run_on_machine
from lockstep.ladder.check import errors


def test_right_and_free_of_hazards(traced, step, problem):
    found, traces = traced(step, problem)
    for trace in traces:
        trace.check()
    assert found.ok


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("S", [1, 63, 111, 257])
@pytest.mark.parametrize("D", [32, 64, 128])
def test_right_on_the_gpu(step, D, S):
    for causal, dtype in ((False, "float16"), (True, "bfloat16")):
        problem = Problem(B=2, H=3, S=S, D=D, causal=causal, dtype=dtype)
        tensors = problem.draw(device="cuda")
        run_on_gpu(step, problem, tensors)
        assert errors(problem, tensors).ok, problem


@pytest.mark.slow
def test_only_the_keys_within_the_secret_length_count(oblivious):
    for length in (0, 37):
        problem = Problem(B=1, H=1, S=50, D=32, causal=length == 37, length=length)
        tensors = problem.draw(seed=length)
        # what lies beyond the length does not matter, however large
        tensors.k[:, :, length:] = 300.0
        _, (trace,) = run_on_machine(oblivious, problem, tensors)
        trace.check()
        assert errors(problem, tensors).ok


@pytest.mark.slow
def test_the_machine_counts_the_same_whatever_the_secrets(oblivious):
    seen = set()
    for seed, length in ((0, 40), (1, 3)):
        problem = Problem(B=1, H=1, S=40, D=32, causal=True, length=length)
        _, (trace,) = run_on_machine(oblivious, problem, problem.draw(seed))
        seen.add(str(trace.totals.to_json()) + str(trace.depth))
    assert len(seen) == 1


@pytest.mark.parametrize("causal", [False, True])
def test_what_is_secret_is_declared_secret(oblivious, causal):
    """The front end proves what the annotations say; here they must say q, k, v and the length."""
    problem = Problem(B=1, H=1, S=70, D=64, causal=causal, length=33)
    for launch in launches_of(oblivious, problem, problem.draw()):
        assert {"q", "k", "v", "length"} <= launch.kernel.secrets
        typed = launch.kernel.typed(**launch.arguments)
        assert not typed.warnings  # nothing that compiles to a data-dependent slow path


def test_the_ladder_is_climbed_in_order():
    names = [rung.name for rung in RUNGS]
    assert names[:5] == ["naive", "row_per_thread", "large_tile", "small_tile", "small_tile_2d"]
    assert len(set(names)) == len(names)
    for rung in RUNGS:
        assert find(rung.name) is rung
    with pytest.raises(ValueError, match="no rung 'tiny_tile'; there are naive, row_per_thread"):
        find("tiny_tile")


def test_options():
    rung = find("small_tile")
    assert rung.choose(softmax="sequential").title == "small_tile (sequential)"
    assert rung.settings == {"softmax": "tree"}
    with pytest.raises(
        ValueError, match="softmax is 'fast', small_tile takes 'tree', 'sequential'"
    ):
        rung.choose(softmax="fast")
    with pytest.raises(ValueError, match="naive has no option 'softmax'"):
        find("naive").choose(softmax="tree")


def test_refusals():
    with pytest.raises(ValueError, match="naive is not constant-time and takes no length"):
        run_on_machine(find("naive"), Problem(B=1, H=1, S=8, D=32, length=3))
    with pytest.raises(ValueError, match="D is 48, takes one of 32, 64, 128"):
        Problem(B=1, H=1, S=8, D=48)
    with pytest.raises(ValueError, match="S is 0, takes 1 or more"):
        Problem(B=1, H=1, S=0, D=32)
    with pytest.raises(ValueError, match="length is 9, takes 0 to S = 8"):
        Problem(B=1, H=1, S=8, D=32, length=9)
    with pytest.raises(TypeError, match="dtype is 'float32', takes float16 or bfloat16"):
        Problem(B=1, H=1, S=8, D=32, dtype="float32")


def test_naive_takes_turns_when_the_scores_do_not_fit(monkeypatch):
    from lockstep.ladder.rungs import r01_naive as naive

    monkeypatch.setattr(naive, "MAX_SCORES", 2 * 20 * 20)
    problem = Problem(B=1, H=5, S=20, D=32)
    tensors = problem.draw()
    _, traces = run_on_machine(find("naive"), problem, tensors)
    assert len(traces) == 9  # 2 + 2 + 1 heads, three passes each
    assert errors(problem, tensors).ok


def test_an_unwritten_element_is_an_error():
    problem = Problem(B=1, H=1, S=4, D=32)
    tensors = problem.draw()
    tensors.out.copy_(torch.nn.functional.scaled_dot_product_attention(*tensors[:3]))
    assert errors(problem, tensors).ok
    tensors.out[0, 0, 3, 31] = float("nan")
    assert not errors(problem, tensors).ok


def test_a_trace_that_fails_does_not_wait_for_what_it_is_held_against(monkeypatch):
    worked_out = []

    def one_by_one(problem, tensors):
        for head in range(problem.heads):
            worked_out.append(head)
            begun.set()
            time.sleep(0.01)
            yield check.Standard(tensors.out, 0.0, 0.0)

    def fails(*_):
        begun.wait()
        raise KeyboardInterrupt

    begun = threading.Event()
    monkeypatch.setattr(check, "standards_of", one_by_one)
    monkeypatch.setattr(check, "run_on_machine", fails)
    with pytest.raises(KeyboardInterrupt):
        check.run_and_check(find("naive"), Problem(B=40, H=40, S=1, D=32))
    assert len(worked_out) < 1600


def test_every_step_of_a_rung_says_what_is_new_in_it():
    words = [step.what_is_new for rung in RUNGS for step in rung.steps()]
    assert len(set(words)) == len(words)
    tiled = find("small_tile")
    assert tiled.what_is_new == tiled.choose(softmax="tree").what_is_new  # the default
    apart = find("split_kv").choose(tile="8x8", kv_tiles=2)  # no step of its own
    assert apart.what_is_new == find("split_kv").summary
