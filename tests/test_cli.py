"""The command line: help, exit statuses, JSON."""

from __future__ import annotations

import dataclasses
import errno
import json
import subprocess
import sys
from importlib import metadata

import pytest
import torch
import typer
from rich.console import Console
from rich.measure import Measurement
from typer.testing import CliRunner

from lockstep import cli, demo
from lockstep.bench import cpu, show, timing
from lockstep.demo import checks
from lockstep.dispatch import KERNELS
from lockstep.output import command, results

runner = CliRunner()


def small(case: cpu.Case) -> cpu.Case:
    """The same case over fewer tokens."""
    shorter = {"Sq": min(case.Sq, 32), "Skv": min(case.Skv, 32)}
    return dataclasses.replace(case, **shorter)


@pytest.fixture
def small_cases(monkeypatch):
    monkeypatch.setattr(cpu, "CASES", tuple(map(small, cpu.CASES)))
    monkeypatch.setattr(demo, "SPEED_CASES", tuple(map(small, demo.SPEED_CASES)))
    monkeypatch.setattr(demo, "LADDER", dataclasses.replace(demo.LADDER, S=20))
    monkeypatch.setattr(checks, "S", 65)
    monkeypatch.setattr(timing, "SAMPLE_SECONDS", 1e-9)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["demo", "doctor", "bench", "audit", "trace", "show"]),
        (["audit", "bits"], ["--device", "--kernel", "--json"]),
        (["demo"], ["Exit status 1"]),
        (["doctor"], ["--json"]),
        (["bench"], ["cpu", "gpu"]),
        (["bench", "gpu"], ["--table", "--quick", "--json", "--save"]),
        (["bench", "cpu"], ["--quick", "--json", "--save"]),
    ],
)
def test_help_names_what_there_is(arguments, expected):
    result = runner.invoke(cli.app, [*arguments, "--help"])
    assert result.exit_code == 0
    for text in expected:
        assert text in result.stdout


def test_the_package_runs_as_the_command():
    """Under the name by which it was called, and with the statuses of the command."""
    run = [sys.executable, "-m", "lockstep"]
    shown = subprocess.run([*run, "--help"], capture_output=True, text=True)
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.split()[:4] == ["Usage:", "python", "-m", "lockstep"]
    refused = subprocess.run([*run, "plan", "tiny_tile"], capture_output=True, text=True)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: there is no rung 'tiny_tile'")


def test_no_command_is_an_error_that_shows_help():
    result = runner.invoke(cli.app, [])
    assert result.exit_code == 2
    assert "doctor" in result.output


@pytest.mark.parametrize("arguments", [["dance"], ["bench", "toaster"], ["doctor", "--yaml"]])
def test_what_is_not_there_is_a_usage_error(arguments):
    assert runner.invoke(cli.app, arguments).exit_code == 2


def test_version(monkeypatch):
    monkeypatch.setattr(cli.metadata, "version", lambda name: f"7.8.9 of {name}")
    result = runner.invoke(cli.app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == "lockstep 7.8.9 of lockstep-attention\n"


def test_doctor_knows_this_machine_and_every_kernel():
    result = runner.invoke(cli.app, ["doctor", "--json"])
    assert result.exit_code == 0
    facts = json.loads(result.stdout)
    assert facts["versions"]["torch"] == metadata.version("torch")
    assert facts["threads"] == torch.get_num_threads()
    assert [kernel["name"] for kernel in facts["kernels"]] == [kernel.name for kernel in KERNELS]
    oracle = next(kernel for kernel in facts["kernels"] if kernel["name"] == "oracle")
    assert oracle["refusals"]["cpu fp64"] is None
    assert "takes float64" in oracle["refusals"]["cpu fp32"]


def test_doctor_prints_reasons():
    result = runner.invoke(cli.app, ["doctor"])
    assert result.exit_code == 0
    assert "refuses  cpu fp32 bf16 fp16: takes float64" in result.stdout


@pytest.mark.usefixtures("small_cases")
def test_bench_cpu_prints_json_alone_on_stdout_and_saves_the_same(monkeypatch, tmp_path):
    monkeypatch.setattr(results, "checkout", lambda: tmp_path)
    result = runner.invoke(cli.app, ["bench", "cpu", "--quick", "--json", "--save"])
    assert result.exit_code == 0, result.stderr
    run = json.loads(result.stdout)
    assert run["suite"] == "cpu"
    assert [row["case"] for row in run["rows"]] == [case.name for case in cpu.CASES]
    for row in run["rows"]:
        assert {"lockstep", "SDPA", row["against"]} <= set(row["ms"])
        assert row["kernel"] in ("cpu", "amx" if row["dtype"] == "bf16" else "cpu")
    (saved,) = (tmp_path / results.RESULTS).glob("cpu_*.json")
    assert json.loads(saved.read_text()) == run
    assert saved.name in result.stderr.replace("\n", "")


@pytest.mark.usefixtures("small_cases")
def test_bench_cpu_prints_a_row_per_case():
    # Times of a busy machine are wide.
    result = runner.invoke(cli.app, ["bench", "cpu", "--quick"], env={"COLUMNS": "100"})
    assert result.exit_code == 0, result.stderr
    for case in cpu.CASES:
        assert case.name in result.stdout


def test_the_table_of_bench_cpu_fits_into_80_columns():
    measured = {"ms": {"lockstep": 123.4, "SDPA": 239.1}, "gflops": 9.0, "speed": 58.59}
    facts = ("dtype", "against", "at_least", "aim")
    rows = [
        {"case": case.name, "shape": case.shape, **measured}
        | {name: getattr(case, name) for name in facts}
        for case in cpu.CASES
    ]
    console = Console(width=200)
    width = Measurement.get(console, console.options, show.cpu_table(rows, roof=10.0)).maximum
    assert width <= 80


@pytest.mark.usefixtures("small_cases")
def test_bench_cpu_does_not_time_a_wrong_result(monkeypatch):
    monkeypatch.setattr("lockstep.attention", lambda q, k, v, **_: torch.zeros_like(q))
    result = runner.invoke(cli.app, ["bench", "cpu", "--quick"])
    assert result.exit_code == 1
    assert "wrong result: fp32 forward" in result.stderr
    assert "speed" not in result.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("small_cases")
def test_demo_holds_here():
    """On a terminal without Unicode, too."""
    result = CliRunner(charset="ascii").invoke(cli.app, ["demo"])
    assert result.exit_code == 0, result.output
    assert result.stdout_bytes.isascii()
    assert "Every check holds." in result.stdout
    for title in ("Exact", "Same bits", "Fast"):
        assert title in result.stdout


@pytest.mark.usefixtures("small_cases")
@pytest.mark.parametrize(
    "failing",
    [
        ("exactness", checks.Exactness("fp32 output", ours=3e-6, theirs=1e-6, allowed=2e-6)),
        ("same_bits", checks.SameBits("the same call again", ours=0.99, theirs=1.0)),
    ],
    ids=["exactness", "same_bits"],
)
def test_demo_fails_when_a_check_does(monkeypatch, failing):
    name, check = failing
    monkeypatch.setattr(checks, name, lambda: iter([check]))
    monkeypatch.setattr(demo, "SPEED_CASES", ())
    monkeypatch.setattr(demo, "_climb", lambda: ())
    result = runner.invoke(cli.app, ["demo"])
    assert result.exit_code == 1
    assert "A check failed." in result.stdout


# What each command does first, so that it can be made to fail there.
BEGINS = {
    ("demo",): "lockstep.demo.run",
    ("doctor",): "lockstep.commands.doctor.examine",
    ("bench", "cpu"): "lockstep.bench.cpu.run",
    ("bench", "gpu"): "lockstep.bench.gpu_run.main",
    ("audit", "bits"): "lockstep.audit.cli._prepare",
    ("ladder",): "lockstep.ladder.cli.problem_of",
    ("plan",): "lockstep.ladder.cli.problem_of",
    ("trace", "naive"): "lockstep.ladder.cli.problem_of",
    ("show", "naive"): "lockstep.ladder.cli.problem_of",
    ("claims",): "lockstep.ladder.claims.claim.Claim.test",
}


@pytest.fixture(params=BEGINS, ids=" ".join)
def failing_with(request, monkeypatch):
    """The result of a command that meets an error."""

    def fail(error: BaseException):
        def begin(*args, **kwargs):
            raise error

        monkeypatch.setattr(BEGINS[request.param], begin)
        return runner.invoke(cli.app, request.param)

    return fail


def test_ctrl_c_ends_every_command_with_one_line(failing_with):
    result = failing_with(KeyboardInterrupt())
    assert result.exit_code == 130
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.strip() == "interrupted"


INTERRUPTED_IMPORT = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored if tests run in the background
class CtrlC:
    def find_spec(self, name, path=None, target=None):
        if name == "lockstep":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, CtrlC())
import lockstep_command
lockstep_command.main()
"""


def test_ctrl_c_ends_the_script_while_it_is_imported():
    done = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True)
    assert (done.returncode, done.stderr) == (130, b"interrupted\n")


NO_MEMORY = [
    MemoryError("Unable to allocate 745. GiB"),
    RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes.\nframe #0: ..."),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 TiB."),
]


@pytest.mark.parametrize("error", NO_MEMORY, ids=lambda error: type(error).__name__)
def test_a_lack_of_memory_ends_every_command_with_one_line(failing_with, error):
    result = failing_with(error)
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.strip().startswith("error: not enough memory: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_full_disk_ends_every_command_with_one_line(failing_with):
    result = failing_with(OSError(errno.ENOSPC, "No space left on device"))
    assert result.exit_code == 2
    assert isinstance(result.exception, SystemExit)
    assert result.stderr.strip() == "error: No space left on device"


def test_an_error_of_ours_is_not_taken_for_a_lack_of_memory(monkeypatch):
    def examine():
        raise RuntimeError("something else")

    monkeypatch.setattr("lockstep.commands.doctor.examine", examine)
    assert isinstance(runner.invoke(cli.app, ["doctor"]).exception, RuntimeError)


# Those of the ladder have a test of their own.
PRINTING = [
    ["doctor"],
    ["doctor", "--json"],
    ["bench", "cpu", "--quick"],
    ["trace", "transpose, padded"],
    ["audit", "bits", "--device", "cpu", "--seq", "40", "--repeats", "2", "--head-dim", "8"],
    ["audit", "bits", "--seq", "99999999999"],
    ["--help"],
]


@pytest.mark.slow
@pytest.mark.usefixtures("small_cases")
@pytest.mark.parametrize("arguments", PRINTING, ids=" ".join)
def test_a_terminal_without_unicode_gets_other_characters(arguments):
    result = CliRunner(charset="ascii").invoke(cli.app, arguments)
    assert result.exit_code == (2 if "99999999999" in arguments else 0), result.output
    assert result.stdout_bytes.isascii()
    assert (result.stdout_bytes + result.stderr_bytes).strip()
    if "--json" in arguments:
        json.loads(result.stdout)


@pytest.mark.parametrize("command", ["trace", "show"])
def test_the_commands_of_the_simt_machine_are_mounted(command):
    result = runner.invoke(cli.app, [command, "no such kernel"])
    assert result.exit_code == 2
    assert "no such kernel" in result.stderr


def test_the_process_ends_with_the_status_of_the_command(monkeypatch, capsys):
    app, ended = typer.Typer(), []

    @app.command()
    def ends(status: int) -> None:
        typer.echo("done")
        raise typer.Exit(status)

    monkeypatch.setattr(command.atexit, "_run_exitfuncs", lambda: ended.append("at exit"))
    monkeypatch.setattr(command.os, "_exit", ended.append)
    monkeypatch.setattr(sys, "argv", ["lockstep", "3"])
    command.run(app)
    assert ended == ["at exit", 3]
    assert capsys.readouterr().out == "done\n"
    # A caller may have closed standard output.
    monkeypatch.setattr(sys, "stdout", None)
    command.run(app)
    assert ended == ["at exit", 3] * 2


@pytest.mark.parametrize("kind", [ValueError, TypeError])
def test_errors_of_arguments_name_options_as_typed(kind):
    with (
        pytest.raises(kind, match=r"^--seq is 0, takes up to --seq · 2, not Ss$"),
        command.errors_by_option({"S": "--seq"}),
    ):
        raise kind("S is 0, takes up to S · 2, not Ss")
