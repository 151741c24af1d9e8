"""`lockstep bench gpu`: what it says without a GPU, and that one bad contender spoils one cell."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from lockstep import cli
from lockstep.bench import (
    gpu,
    gpu_calls,
    gpu_cases,
    gpu_check,
    gpu_run,
    lengths,
    ours,
    peers,
    show,
    timing,
)
from lockstep.bench.contender import Contender
from lockstep.bench.row import DeviceLost
from lockstep.kernels import cpu
from lockstep.kernels.cpu.compiler import matrix
from lockstep.output import results

runner = CliRunner()
SMALL = {
    "forward": gpu_cases.Case("forward", 64, 16, 2, 2, 1, causal=True),
    "small": gpu_cases.Case("small", 32, 16, 2, 2, 1),
    "backward": gpu_cases.Case("backward", 64, 16, 2, 2, 1),
    "decode": gpu_cases.Case("decode", 512, 16, 4, 2, 2, causal=True),
    "varlen": gpu_cases.Case("varlen", 64, 16, 2, 2, 5, causal=True),
    "host": gpu_cases.Case("host", 32, 16, 2, 2, causal=True),
    "host_decode": gpu_cases.Case("host_decode", 512, 16, 4, 2, causal=True),
}


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Everything but the timing, with the CPU kernel in place of one for a GPU: every call takes
    2 ms, but for the peer called "right", which takes 3."""
    monkeypatch.setattr(gpu_calls, "_normal", lambda *sizes: torch.randn(*sizes).bfloat16())
    monkeypatch.setattr(gpu, "kernels", lambda: [cpu.KERNEL])
    monkeypatch.setattr(matrix, "refusal", lambda: "stands aside")
    monkeypatch.setattr(gpu_cases, "CASES", (SMALL["forward"], SMALL["backward"]))
    monkeypatch.setattr(results, "processor", lambda run: "GPU")
    monkeypatch.setattr(peers, "find", list)
    monkeypatch.setattr(
        "lockstep.environment.versions", lambda: {"torch": "2", "python": "3", "triton": "3"}
    )

    def take_turns(calls, rounds):
        return timing.Timings({n: [3e-3 if n == "right" else 2e-3] * rounds for n in calls})

    monkeypatch.setattr(gpu, "take_turns", take_turns)
    monkeypatch.setattr(gpu, "take_host_turns", take_turns)


def right(q, k, v, causal):
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def wrong(q, k, v, causal):
    return lambda: q + k + v


def nan(q, k, v, causal):
    return lambda: (q + k + v) * torch.nan


def broken(q, k, v, causal):
    raise RuntimeError("no such\nthing")


def refusing(q, k, v, causal):
    raise NotImplementedError("no kernel runs this\n  not here")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without CUDA")
def test_no_gpu_is_said_plainly():
    result = runner.invoke(cli.app, ["bench", "gpu"])
    assert result.exit_code == 2
    assert "no CUDA device here" in result.stderr
    assert result.stdout == ""


def test_an_unknown_table_is_a_usage_error():
    result = runner.invoke(cli.app, ["bench", "gpu", "--table", "sideways"])
    assert result.exit_code == 2
    assert "got 'sideways'" in result.stderr


def test_every_case_has_a_name_of_its_own_and_a_unit():
    names = [(case.table, case.name) for case in gpu_cases.CASES]
    assert len(set(names)) == len(names)
    assert {case.table for case in gpu_cases.CASES} == set(gpu_cases.UNITS) == set(gpu_calls.TABLES)


def test_the_cases_cover_head_dims_lengths_masks_and_batches():
    found = {(case.table, case.D, case.S, case.causal) for case in gpu_cases.CASES}
    for table in ("forward", "backward"):
        for D in (64, 128):
            for S in (1024, 4096, 16384):
                assert {(table, D, S, False), (table, D, S, True)} <= found
    assert {("forward", 256, 16384, False), ("forward", 256, 16384, True)} <= found
    cells = {(case.B, case.S) for case in gpu_cases.CASES if case.table == "decode"}
    assert cells == {(B, S) for B in (1, 8, 64) for S in (4096, 16384, 65536)}
    for case in gpu_cases.CASES:
        assert case.table not in ("forward", "backward") or case.B * case.S == 16384


def test_cases_are_chosen_by_table_and_by_words_in_their_names():
    assert gpu_run.choose() == list(gpu_cases.CASES)
    assert {case.S for case in gpu_run.choose(["forward"], ["D 64, S 4k"])} == {4096}


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("table", ["forward", "backward"])
def test_a_contender_that_fails_or_errs_has_its_reason_and_no_figure(table):
    contenders = [
        *ours.contenders([cpu.KERNEL]),
        Contender("right", right, backward=True),
        Contender("tokens first", right, backward=True, tokens_first=True),
        Contender("wrong", wrong, backward=True),
        Contender("nan", nan, backward=True),
        Contender("broken", broken, backward=True),
        Contender("refusing", refusing, backward=True),
        Contender("forward only", right),
    ]
    row = gpu.run(SMALL[table], contenders, rounds=2).as_json()
    forward_only = {"forward only", "cpu, query-invariant"} if table == "forward" else set()
    assert set(row["rate"]) == {"cpu", "right", "tokens first"} | forward_only
    assert row["refused"] == {"refusing": "not here"}
    assert row["failed"]["broken"] == "RuntimeError: no such"
    what = "out" if table == "forward" else "dq"
    assert row["failed"]["wrong"].startswith(f"WrongResult: {what} is off by")
    assert row["failed"]["nan"].startswith(f"WrongResult: {what} is off by inf")
    products = 4 * 2 * 64 * 64 * 16 * (0.5 if table == "forward" else 2.5)
    assert row["rate"]["cpu"] == pytest.approx(products / 1e9 / 2.0, abs=0.05)
    assert row["chosen"] == "cpu"
    assert row["best_peer"] == "tokens first"
    assert 0 < row["error"]["cpu"] <= 1


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("table", list(SMALL))
def test_every_table_checks_and_times_our_kernels(table):
    row = gpu.run(SMALL[table], ours.contenders([cpu.KERNEL]), rounds=1).as_json()
    assert "cpu" in row["ms"], row
    assert row["chosen"] == "cpu"
    assert not row["failed"]
    if table == "varlen":
        # What packing is held against has no result of its own to be wrong.
        assert "cpu, equal lengths" in row["ms"]
        assert "cpu, equal lengths" not in row["error"]
    if table in ("small", "host", "host_decode"):
        assert row["unit"] == "µs"
        assert row["rate"]["cpu"] == pytest.approx(2000)


@pytest.mark.parametrize("table", ["decode", "varlen"])
@pytest.mark.usefixtures("on_the_cpu")
def test_a_wrong_row_of_the_last_head_is_found(table):
    work = gpu_calls.TABLES[table](SMALL[table])
    (mine, *_) = ours.contenders([cpu.KERNEL])
    out = work.prepare(mine)()
    expected = gpu_check.expect(work.pieces, causal=True, backward=False)
    assert gpu_check.largest_error(work.pick(out), expected) <= 1
    out[-1, -1] += 0.5
    with pytest.raises(timing.WrongResult, match="out is off by"):
        gpu_check.largest_error(work.pick(out), expected)


def test_the_oracle_in_blocks_of_rows_is_the_oracle(monkeypatch):
    q, k, v, dout = torch.randn(4, 50, 16).bfloat16()
    piece = gpu_check.Piece(q[:30], k, v, dout[:30])
    whole = gpu_check._exact(piece, True, True)
    monkeypatch.setattr(gpu_check, "ROWS", 7)
    for a, b in zip(gpu_check._exact(piece, True, True), whole, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.usefixtures("on_the_cpu")
def test_peers_of_a_script_take_part_and_the_run_is_saved(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(peers, "find", lambda: [Contender("right", broken)])
    added = [Contender("right", right, version="1.2")]
    assert gpu_run.main([], as_json=True, more_peers=added, directory=tmp_path) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["rows"][0]["rate"].keys() == {"cpu", "cpu, query-invariant", "right"}
    assert run["rows"][0]["speed"]["cpu"] == 1.5
    assert run["peers"] == {"right": "1.2"}
    assert run["missing"] == []
    (saved,) = tmp_path.glob("gpu_*.json")
    assert json.loads(saved.read_text()) == run
    assert gpu_run.main(["forward"], more_peers=[Contender("right", broken)]) == 0
    shown = capsys.readouterr().out
    assert "right: RuntimeError: no such" in shown
    assert "backward" not in shown


@pytest.mark.usefixtures("on_the_cpu")
def test_no_figure_is_cut_short_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "40")
    added = [Contender(f"a library with a long name, {i}", right) for i in range(5)]
    assert gpu_run.main(["forward"], more_peers=added) == 0
    shown = capsys.readouterr().out
    assert "…" not in shown
    assert all(peer.name in shown for peer in added)


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.parametrize("stop", [DeviceLost("gone"), KeyboardInterrupt()])
def test_a_run_that_is_cut_off_says_what_is_missing(monkeypatch, tmp_path, stop):
    real = gpu.run

    def run(case, contenders, *, rounds):
        if case.table == "backward":
            raise stop
        return real(case, contenders, rounds=rounds)

    monkeypatch.setattr(gpu, "run", run)
    if isinstance(stop, DeviceLost):
        assert gpu_run.main([], directory=tmp_path) == 1
    else:
        with pytest.raises(KeyboardInterrupt):
            gpu_run.main([], directory=tmp_path)
    (saved,) = tmp_path.glob("gpu_*.json")
    kept = json.loads(saved.read_text())
    assert [row["table"] for row in kept["rows"]] == ["forward"]
    assert kept["missing"] == ["backward: D 16, S 64"]


@pytest.mark.usefixtures("on_the_cpu")
def test_no_case_begins_after_the_deadline(monkeypatch, tmp_path, capsys):
    now = iter([1.0, 3.0])
    monkeypatch.setattr(gpu_run, "perf_counter", lambda: next(now))
    assert gpu_run.main([], deadline=2.0, directory=tmp_path) == 0
    assert "out of time, left out: backward: D 16, S 64" in capsys.readouterr().err
    (saved,) = tmp_path.glob("gpu_*.json")
    assert json.loads(saved.read_text())["missing"] == ["backward: D 16, S 64"]


@pytest.mark.usefixtures("on_the_cpu")
def test_a_wrong_result_of_ours_ends_with_status_1(monkeypatch):
    monkeypatch.setattr("lockstep.attention", lambda q, k, v, **_: torch.zeros_like(q))
    assert gpu_run.main(["forward"]) == 1


@pytest.mark.usefixtures("on_the_cpu")
def test_a_case_that_does_not_fit_into_memory_is_left_out(monkeypatch):
    def full(*sizes):
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(gpu_calls, "_normal", full)
    row = gpu.run(SMALL["forward"], ours.contenders([cpu.KERNEL])).as_json()
    assert row["refused"]["cpu"] == "the case does not fit into memory"
    assert gpu_run.main(["forward"]) == 0


def test_a_cell_without_a_figure_says_why():
    def row(case, S, rate, failed):
        about = {"case": case, "table": "t", "D": 64, "B": 1, "S": S, "causal": False, "unit": "T"}
        who = {"ours": ["a"], "peers": ["b"], "chosen": "a", "best_peer": "b"}
        ms = {name: 1 / value for name, value in rate.items()}
        speed = {"a": 0.92} if "b" in rate else {}
        return {**about, **who, "rate": rate, "ms": ms, "failed": failed, "speed": speed}

    rows = [
        row("y", 2, {"a": 11.0, "b": 12.0}, {}),
        row("x", 1, {"a": 10.0}, {"b": "WrongResult: off"}),
        row("z", 3, {"a": 10.0}, {"b": "RuntimeError: no"}),
    ]
    made = show.gpu_table("t", rows)
    assert [column.header for column in made.columns] == ["t", "a", "b", "chosen", "× best peer"]
    assert [str(cell) for cell in made.columns[2].cells] == ["wrong", "12", "failed"]
    assert [str(cell) for cell in made.columns[4].cells] == ["–", "0.92× b", "–"]


def test_lengths_have_a_long_tail():
    lens = lengths.long_tailed_lengths(64, 32768)
    assert abs(sum(lens) - 32768) < 64
    assert max(lens) > 8 * sorted(lens)[32] > 64 * min(lens) / 8 > 0
    assert lens != sorted(lens)
    assert min(lengths.long_tailed_lengths(5, 5)) == 1


@pytest.mark.usefixtures("on_the_cpu")
def test_equal_lengths_are_as_much_work_as_packed_ones(monkeypatch):
    made = {}
    monkeypatch.setattr("lockstep.attention", lambda q, k, v, **_: made.update(q=q))
    lens = lengths.long_tailed_lengths(64, 32768)
    cu_seqlens = torch.tensor([0, *lens]).cumsum(0).int()
    q = torch.empty(sum(lens), 1, 8)
    ours._equal_lengths(q, q, q, cu_seqlens, max(lens), True, "cpu")()
    B, _, S, _ = made["q"].shape
    pairs, tokens = B * S * S, B * S
    assert pairs == pytest.approx(sum(n * n for n in lens), rel=1e-3)
    assert tokens == pytest.approx(sum(lens), rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("table", list(gpu_cases.UNITS))
def test_every_table_runs_on_a_gpu(table):
    sizes = dict.fromkeys(("forward", "small", "backward", "host"), (256, 64, 4, 4, 2))
    sizes |= dict.fromkeys(("decode", "host_decode"), (512, 128, 8, 2, 2))
    sizes |= {"varlen": (256, 64, 4, 4, 8)}
    case = gpu_cases.Case(table, *sizes[table], causal=True)
    contenders = [*ours.contenders(gpu.kernels()), *peers.find()[:2]]
    row = gpu.run(case, contenders, rounds=1)
    assert "triton" in row.timings.seconds, row.failed
    assert row.chosen in row.timings.seconds
