"""`lockstep audit exact`: what it draws, and that each of its checks can fail."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from kernel_calls import backward as run_backward
from kernel_calls import forward as run_forward
from kernel_calls import preparing, preparing_backward
from typer.testing import CliRunner

from lockstep import cli, dispatch
from lockstep.audit import drawing, exact, exact_checks, values
from lockstep.audit.cases import Case
from lockstep.audit.exact_checks import Broken
from lockstep.kernels import cpu

runner = CliRunner()
ALL = ["audit", "exact", "--device", "cpu"]


@pytest.fixture
def toy(monkeypatch):
    """`toy(spoil)`: a kernel that runs the CPU's forward and then spoils its out, by name."""

    def register(spoil: Callable[..., torch.Tensor]) -> str:
        def forward(problem, tensors):
            out, *rest = run_forward(cpu.KERNEL, problem, tensors)
            return spoil(problem, tensors, out), *rest

        kernel = replace(cpu.KERNEL, name=f"toy {id(spoil)}", prepare=preparing(forward))
        monkeypatch.setattr(dispatch, "KERNELS", (kernel, cpu.KERNEL))
        return kernel.name

    return register


def dense(B=2, Sq=9, Skv=20, **more) -> Case:
    q, k, v = torch.randn(B, 2, Sq, 8), torch.randn(B, 1, Skv, 8), torch.randn(B, 1, Skv, 8)
    return Case({"q": q, "k": k, "v": v}).replaced(**more)


def holds(check: Callable[..., dict[str, float]], case: Case) -> None:
    check(case, None, "cpu")


def test_a_wrong_output_is_found(toy):
    name, case = toy(lambda problem, tensors, out: out * 1.0001), dense()
    holds(exact_checks.exact, case)
    with pytest.raises(Broken, match=r"out is off by .* times what the error rule allows"):
        exact_checks.exact(case, None, name)


def test_an_output_that_was_never_written_is_found(toy):
    def spoil(problem, tensors, out):
        fresh = torch.empty_like(out)
        fresh[:, :, :-1] = out[:, :, :-1]
        return fresh

    with pytest.raises(Broken, match="out is off by inf"):
        exact_checks.exact(dense(), None, toy(spoil))


def test_a_wrong_gradient_is_found(monkeypatch):
    def backward(*given):
        found = run_backward(cpu.KERNEL, *given)
        return found._replace(k=found.k * 1.0001)

    prepare_backward = preparing_backward(backward)
    kernel = replace(cpu.KERNEL, name="toy backward", prepare_backward=prepare_backward)
    monkeypatch.setattr(dispatch, "KERNELS", (kernel, cpu.KERNEL))
    case, douts = dense(), (torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9))
    assert set(exact_checks.exact(case, douts, "cpu")) == {"out", "lse", "dq", "dk", "dv"}
    with pytest.raises(Broken, match="dk is off by"):
        exact_checks.exact(case, douts, kernel.name)


def test_a_write_to_an_input_is_found(toy):
    def spoil(problem, tensors, out):
        tensors.v[0, 0, 0, 0] += 1
        return out

    with pytest.raises(Broken, match=r"the call wrote to its inputs: v\[0, 0, 0, 0\]"):
        exact_checks.exact(dense(), None, toy(spoil))


LENGTHS = torch.tensor([20, 13])


@pytest.mark.parametrize(
    "case",
    [
        dense(kv_lens=LENGTHS),
        dense(causal=True, window=(3, None)),
        dense(bias=torch.zeros(20).index_fill(0, torch.tensor([4]), -torch.inf)),
    ],
    ids=["beyond a length", "outside a window", "behind a bias"],
)
def test_what_no_row_sees_and_yet_counts_is_found(toy, case):
    holds(exact_checks.leaks, case)
    name = toy(
        lambda problem, tensors, out: out + 0 * tensors.k.sum((1, 2, 3))[:, None, None, None]
    )
    with pytest.raises(Broken, match="garbage that no row sees changes a result"):
        exact_checks.leaks(case, None, name)


def paged(**options) -> Case:
    k, v = torch.randn(2, 9, 4, 1, 8)
    table = torch.randperm(9)[:8].view(2, 4)
    lens = torch.tensor([15, 6])
    return Case(
        {"q": torch.randn(2, 2, 5, 8), "k": k, "v": v, "page_table": table, "kv_lens": lens},
        options,
    )


def test_pages_of_no_sequence_that_count_are_found(toy):
    holds(exact_checks.leaks, paged())
    with pytest.raises(Broken, match="garbage that no row sees changes a result"):
        exact_checks.leaks(paged(), None, toy(lambda p, tensors, out: out + 0 * tensors.v.sum()))


def packed() -> Case:
    offsets = torch.tensor([0, 7, 19])
    q, k, v = torch.randn(19, 2, 8), torch.randn(19, 1, 8), torch.randn(19, 1, 8)
    return Case({"q": q, "k": k, "v": v, "cu_seqlens_q": offsets, "cu_seqlens_k": offsets})


def test_a_neighbour_that_counts_is_found(toy):
    holds(exact_checks.leaks, packed())
    with pytest.raises(Broken, match="NaN in every other sequence changes sequence 0"):
        exact_checks.leaks(packed(), None, toy(lambda p, tensors, out: out + 0 * tensors.k.sum()))


def test_another_result_the_second_time_is_found(toy):
    calls = []

    def spoil(problem, tensors, out):
        calls.append(out)
        return out * (1 + 1e-6 * len(calls))

    holds(exact_checks.repeats, dense())
    with pytest.raises(Broken, match="a second call differs: out"):
        exact_checks.repeats(dense(), None, toy(spoil))


@pytest.mark.parametrize("case", [dense(), packed(), paged()], ids=["dense", "packed", "paged"])
def test_a_sequence_that_depends_on_its_batch_is_found(toy, case):
    def spoil(problem, tensors, out):
        return torch.nextafter(out, torch.full_like(out, torch.inf)) if problem.B > 1 else out

    holds(exact_checks.neighbours, case)
    with pytest.raises(Broken, match="sequence 0 differs when alone: out"):
        exact_checks.neighbours(case, None, toy(spoil))


@pytest.mark.parametrize("case", [dense(causal=True), packed(), paged()])
def test_nan_that_gets_lost_or_spreads_is_found(toy, case):
    holds(exact_checks.propagation, case)
    name = toy(lambda problem, tensors, out: out.nan_to_num())
    with pytest.raises(Broken, match="nan in k does not reach out of a row that sees it"):
        exact_checks.propagation(case, None, name)


def test_nan_that_reaches_other_rows_is_found(toy):
    case = dense(causal=True)
    name = toy(lambda problem, tensors, out: out + 0 * tensors.v.sum())
    with pytest.raises(Broken, match="nan in v changes out of a row that does not see it"):
        exact_checks.propagation(case, None, name)


@pytest.mark.parametrize(
    ("case", "argument"),
    [(dense(kv_lens=LENGTHS), "kv_lens"), (packed(), "cu_seqlens_k"), (paged(), "kv_lens")],
    ids=["lengths", "offsets", "pages"],
)
def test_metadata_that_is_not_checked_is_found(monkeypatch, case, argument):
    holds(exact_checks.metadata, case)

    def refuse(*_, **__):
        raise ValueError("something is wrong")

    monkeypatch.setattr(Case, "call", lambda *_, **__: None)
    with pytest.raises(Broken, match=f"{argument} out of range raises nothing"):
        exact_checks.metadata(case, None, "cpu")
    monkeypatch.setattr(Case, "call", refuse)
    with pytest.raises(Broken, match=f"{argument} out of range raises ValueError: something"):
        exact_checks.metadata(case, None, "cpu")


def test_pages_are_among_bad_metadata():
    names = [name for name, _, _ in exact_checks.corruptions(paged())]
    assert names.count("page_table") == 6
    assert names.count("kv_lens") == 3


def test_a_wrong_page_is_nan_to_the_rows_that_see_it():
    first = exact_checks._reached_by_page(paged(causal=True), 1)
    assert first["out"][1].any()
    assert not first["out"][0].any()
    assert torch.equal(first["out"], first["lse"])
    rows = exact_checks._reached_by_page(paged(window=(0, 0)), 1)["out"]
    assert rows[1, 0].tolist() == [True, True, True, False, False]
    assert not exact_checks._reached_by_page(paged(window=(0, 0)), 0)["out"].any()


def test_a_matrix_of_scores_is_found(toy):
    case = dense(B=1, Sq=6000, Skv=6000)

    def spoil(problem, tensors, out):
        return out + torch.ones(problem.Sq, problem.Skv).mean() * 0

    holds(exact_checks.memory, case)
    with pytest.raises(Broken, match=r"the call takes \d+ MiB"):
        exact_checks.memory(case, None, toy(spoil))


def test_problems_depend_on_seed_and_number_alone():
    recipes = [drawing.draw(3, n, "cpu") for n in range(20)]
    assert recipes == [drawing.draw(3, n, "cpu") for n in range(20)]
    assert len({recipe.lines for recipe in recipes}) == 20
    assert recipes != [drawing.draw(4, n, "cpu") for n in range(20)]


def test_problems_of_one_kind_share_what_gpu_kernels_are_compiled_for():
    by_kind = [
        [drawing.draw(0, first + n, "cuda") for n in range(drawing.PER_KIND["cuda"])]
        for first in range(0, 80, drawing.PER_KIND["cuda"])
    ]
    for recipes in by_kind:
        shared = [x.kinds for x in recipes if not x.memory]
        for start in ("layout", "dtype", "option: causal", "option: sinks"):
            found = {tuple(k for k in kinds if k.startswith(start)) for kinds in shared}
            assert len(found) == 1
        assert len({recipe.lines for recipe in recipes}) == len(recipes)
    assert len({recipes[0].kinds for recipes in by_kind}) > 5


def test_every_kind_is_drawn():
    kinds = {kind for n in range(1500) for kind in drawing.draw(0, n, "cpu").kinds}
    wanted = [f"values: {x.name}" for x in values.VALUES] + [f"bias: {x}" for x in values.BIASES]
    wanted += [f"layout: {x}" for x in drawing.LAYOUTS] + ["long", "gradients"]
    wanted += [f"dtype: {x}" for x in ("float32", "float16", "bfloat16")]
    options = ("causal", "window", "softcap", "scale", "sinks", "kv_lens", "query_invariant")
    wanted += [f"option: {x}" for x in options]
    assert set(wanted) <= kinds


def test_recipes_are_problems_and_their_programs_run(capsys):
    for n in range(40):
        recipe = drawing.draw(n, 0, "cpu")
        case, douts = recipe.build()
        problem, _ = case.pose()
        assert douts is None or douts[0].shape == problem.out_shape
    recipe = drawing.draw(0, 0, "cpu")
    case, douts = recipe.build()
    exec(recipe.snippet("exact", "cpu"), {})
    shares = exact_checks.exact(case, douts, "cpu")
    assert capsys.readouterr().out.strip() == str(shares)


def test_the_first_failure_ends_it_with_a_program(toy):
    name = toy(lambda problem, tensors, out: out + 1)
    result = runner.invoke(cli.app, [*ALL, "--kernel", name, "--problems", "9", "--seed", "0"])
    assert result.exit_code == 1
    assert f"{name}: exact: out is off by" in result.stdout
    program = result.stdout[result.stdout.index("import math, torch") :]
    with pytest.raises(Broken, match="out is off by"):
        exec(program, {})


def test_an_exception_is_a_failure(toy):
    def spoil(problem, tensors, out):
        raise RuntimeError("out of luck")

    name = toy(spoil)
    *_, summary = exact.audit([dispatch.KERNELS[0]], problems=3)
    assert summary.problems == 1
    assert summary.failure.kernel == name
    assert summary.failure.what == "RuntimeError: out of luck"


def test_what_holds_ends_with_status_0_and_json(monkeypatch):
    monkeypatch.setattr(exact_checks, "checks", lambda kernel, long: ("repeats",))
    arguments = [*ALL, "--problems", "3", "--seed", "5"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert "Every check holds." in result.stdout
    assert "3 problems on cpu, seed 5" in result.stdout
    found = json.loads(runner.invoke(cli.app, [*arguments, "--json"]).stdout)
    assert found["ok"] is True
    assert found["problems"] == 3
    assert {"kernel": "cpu", "check": "repeats", "problems": 3} in found["checks"]


def test_ctrl_c_prints_what_was_done(monkeypatch):
    monkeypatch.setattr(exact_checks, "checks", lambda kernel, long: ("repeats",))
    real, asked = exact.draw, []

    def draw(seed, number, device):
        asked.append(number)
        if number == 2:
            raise KeyboardInterrupt
        return real(seed, number, device)

    monkeypatch.setattr(exact, "draw", draw)
    result = runner.invoke(cli.app, [*ALL, "--minutes", "5", "--seed", "5"])
    assert asked == [0, 1, 2]
    assert result.exit_code == 0, result.output
    assert "2 problems on cpu, seed 5" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "banana"], "--device takes cpu or cuda, got 'banana'"),
        (["--kernel", "abacus"], "--kernel takes one of"),
        (["--minutes", "0"], "--minutes takes a number above 0, got 0.0"),
        (["--problems", "-3"], "--problems takes a number above 0, got -3"),
    ],
)
def test_what_cannot_run_is_a_usage_error(arguments, message):
    result = runner.invoke(cli.app, ["audit", "exact", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr.replace("\n", " ")
