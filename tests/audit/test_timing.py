"""The audit of constant time: it finds planted leaks, and none in the constant-time builds."""

from __future__ import annotations

import json
from functools import partial

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from lockstep.audit.timing import clock, code, counters, cpu_counters, memcheck, replay
from lockstep.audit.timing.leaks import LEAKS, MASKED
from lockstep.audit.timing.secrets import CASES, fixed
from lockstep.audit.timing.subjects import Subject
from lockstep.cli import app
from lockstep.kernels.cpu import extras, forward

BY_STEPS = [name for name, leak in LEAKS.items() if leak.steps_differ]
needs_valgrind = pytest.mark.skipif(
    not replay.is_available(), reason="needs Valgrind, its header and a C compiler"
)


@pytest.mark.parametrize("target", code.TARGETS)
@pytest.mark.parametrize("name", BY_STEPS)
def test_planted_leaks_show_in_the_machine_code(name, target):
    found = code.audit(LEAKS[name].kernel, code.TARGETS[target])
    assert found
    assert "secret" in str(found[0])


@pytest.mark.parametrize("target", code.TARGETS)
def test_stores_by_a_mask_of_values_show_in_the_machine_code_of_x86(target):
    (leak,) = MASKED.values()
    found = code.audit(leak.kernel, code.TARGETS[target])
    # Arm has none.
    assert ["which lanes" in x.why for x in found] == [True] * len(found)
    assert bool(found) == (target != "Neoverse N1")


@pytest.mark.parametrize(
    ("kernels", "target"),
    [
        pytest.param(forward.RUNNERS[False, True], "AVX2", marks=pytest.mark.slow),
        (extras.KERNELS[1], "AVX-512"),
        (extras.KERNELS[1], "Neoverse N1"),
    ],
)
def test_constant_time_kernels_have_no_finding(kernels, target):
    assert code.audit(kernels[1], code.TARGETS[target]) == []


@pytest.mark.slow
def test_the_ordinary_kernel_branches_on_values():
    assert code.audit(forward.RUNNERS[False, True][0], code.TARGETS["AVX2"])


@pytest.mark.slow
@needs_valgrind
@pytest.mark.parametrize("name", BY_STEPS)
def test_planted_leaks_show_under_valgrind(name):
    leak = LEAKS[name]
    found = memcheck.findings(lambda: leak.run(leak.draw(torch.Generator().manual_seed(0))))
    assert found
    assert leak.kernel.name in found[0]


@pytest.mark.slow
@needs_valgrind
@pytest.mark.parametrize("name", BY_STEPS)
def test_planted_leaks_show_in_the_counters(name):
    leak = LEAKS[name]
    counts = cpu_counters.count(leak.run, leak.draw, {"fixed": leak.fix})
    found = list(cpu_counters.differing(counts))
    is_look_up = name == "table look-up by value"
    # A look-up executes as much whatever the value is; it shows in where it looks.
    assert any(": load misses " in line for line in found) or not is_look_up
    assert any(": instructions " in line for line in found) != is_look_up


@pytest.mark.slow
@needs_valgrind
def test_constant_time_kernels_execute_and_access_the_same_for_all_secrets():
    """Random values and lengths beside NaN and 0; `lockstep audit timing` has every class."""
    case = CASES[1]
    counts = cpu_counters.count(case.run, case.draw, {"nan": partial(fixed, "nan")})
    assert list(counts) == ["random", "nan"]
    assert list(cpu_counters.differing(counts)) == []
    assert all(found["instructions"] > 100 for found in counts["random"].values())


def test_the_counts_of_callgrind():
    text = "events: Ir Dr DLmr Bc Bcm\nfn=(0)\n0 1 2\n\ntotals: 1200 34 9\n"
    assert cpu_counters.read(text) == {
        "instructions": 1200,
        "loads": 34,
        "branches": 0,
        "mispredicted branches": 0,
    }


@pytest.mark.slow
@needs_valgrind
def test_constant_time_kernels_run_under_valgrind():
    """With secret lengths; the program computes what the call did, or `findings` raises."""
    case = CASES[1]
    drawn = case.draw(torch.Generator().manual_seed(0))
    recorded = replay.record(lambda: case.run(drawn))
    assert len(recorded) == 2
    # q, k, v and the lengths of the second kernel.
    assert sum(piece.is_secret for piece in recorded[1].pieces) >= 4
    assert memcheck.check(recorded[1]) == []


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["vucomiss %xmm0, %xmm1", "jne .LBB0_1"], "branch"),
        (["movl (%rdi), %eax", "testl %eax, %eax", "je .LBB0_1"], "branch"),
        (["vcvttss2si %xmm0, %rax", "vmovss (%rdi,%rax,4), %xmm1"], "address"),
        (["vmovups (%rdi), %ymm0", "vmulps %ymm0, %ymm0, %ymm0", "vmovd %xmm0, %eax",
          "btl $3, %eax", "jb .LBB0_1"], "branch"),
        (["movzwl (%rdi), %eax", "pushq %rax", "movq (%rsp), %rcx", "cmpq $1, %rcx",
          "jg .LBB0_1"], "branch"),
        (["movl (%rdi), %eax", "cqto", "idivq %rcx"], "divided"),
        (["vmovups (%rdi), %ymm0", "vpaddq %ymm0, %ymm0, %ymm0", "vmovq %xmm0, %rax",
          "testq %rax, %rax", "je .LBB0_1"], None),
        (["movl (%rdi), %eax", "xorl %eax, %eax", "testl %eax, %eax", "je .LBB0_1"], None),
        (["kmovw %k1, 24(%rsp)", "kmovw 24(%rsp), %k2", "kmovd %k2, %eax", "testb $1, %al",
          "je .LBB0_1"], None),
        (["vcmpltps %ymm0, %ymm1, %k1", "kmovw %k1, 24(%rsp)", "kmovw 24(%rsp), %k2",
          "kmovd %k2, %eax", "testb $1, %al", "je .LBB0_1"], "branch"),
        (["vucomiss %xmm0, %xmm1", "cmpq %rdi, %rsi", "jne .LBB0_1"], None),
        # Masks of what is loaded or stored.
        (["vcmpltps %ymm0, %ymm1, %ymm2", "vmaskmovps %ymm1, %ymm2, (%rdi)"], "lanes"),
        (["vcmpltps %ymm0, %ymm1, %ymm2", "vmaskmovps (%rdi), %ymm2, %ymm1"], "lanes"),
        (["vcmpltps %zmm0, %zmm1, %k1", "vmovups %zmm1, (%rdi) {%k1}"], "lanes"),
        (["vcmpltps %zmm0, %zmm1, %k1", "vblendmps (%rdi), %zmm1, %zmm2 {%k1}"], "lanes"),
        (["movl (%rdi), %eax", "kmovd %eax, %k2", "vmovups (%rsi), %zmm1 {%k2} {z}"], "lanes"),
        (["vcmpltps %zmm0, %zmm1, %k1", "vaddps %zmm0, %zmm1, %zmm2 {%k1}"], None),
        (["kxnorw %k0, %k0, %k1", "vmovups %zmm0, (%rdi) {%k1}"], None),
        (["vcmpltps %zmm0, %zmm1, %k1", "kxnorw %k1, %k2, %k3", "vmovups %zmm0, (%rdi) {%k3}"],
         "lanes"),
        (["vcmpltps %zmm0, %zmm1, %k1", "movabsq $.LCPI1_2, %rax",
          "vbroadcastss (%rax), %zmm2 {%k1}"], None),
        (["vcmpltps %zmm0, %zmm1, %k1", "movabsq $.LCPI1_2, %rax", "movq %rax, %rcx",
          "movq (%rdi), %rax", "vbroadcastss (%rcx), %zmm2 {%k1}"], None),
        (["vcmpltps %zmm0, %zmm1, %k1", "movabsq $.LCPI1_2, %rax", "movq (%rdi), %rax",
          "vbroadcastss (%rax), %zmm2 {%k1}"], "lanes"),
        (["vcmpltps %zmm0, %zmm1, %k1", "vmovups 64(%rsp), %zmm2 {%k1}"], None),
        # Words by a secret mask are a secret.
        (["vmovups (%rdi), %zmm3", "vcmpltps %zmm0, %zmm1, %k1",
          "vmovdqa64 %zmm3, %zmm4 {%k1} {z}", "vmovq %xmm4, %rax", "testq %rax, %rax",
          "je .LBB0_1"], "branch"),
        # A look-up of many at once.
        (["vcvttps2dq %ymm0, %ymm1", "vpcmpeqd %ymm2, %ymm2, %ymm2",
          "vgatherdps %ymm2, (%rdi,%ymm1,4), %ymm3"], "address"),
    ],
)  # fmt: skip
def test_instructions_of_x86_64(lines, why):
    text = "\n".join(["f:", *("\t" + x.replace(" ", "\t", 1) for x in lines), ".LBB0_1:", "\tretq"])
    found = code.findings("f", text, "x86_64")
    assert [why in x.why for x in found] == ([] if why is None else [True])


@pytest.mark.parametrize(("vectors", "expected"), [(None, 1), ({"f": 1}, 1), ({"f": 0}, 0)])
def test_registers_that_are_no_arguments_hold_no_secrets(vectors, expected):
    text = "f:\n\tvmovq\t%xmm0, %rax\n\ttestq\t%rax, %rax\n\tje\t.LBB0_1\n.LBB0_1:\n\tretq"
    assert len(code.findings("f", text, "x86_64", vectors)) == expected


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (["fcmp s0, s1", "b.eq .LBB0_1"], "branch"),
        (["ldr w8, [x0]", "cbz w8, .LBB0_1"], "branch"),
        (["fcvtzs x8, s0", "ldr s1, [x1, x8]"], "address"),
        (["ldrh w8, [x0]", "str x8, [sp, #8]", "ldr x9, [sp, #8]", "cbnz x9, .LBB0_1"], "branch"),
        (["fmov w8, s0", "add x9, x8, #1", "cmp x9, x2", "b.lt .LBB0_1"], "branch"),
        # A secret from the end of a loop, at its beginning.
        ([".LBB0_2:", "cbz x8, .LBB0_1", "fcvtzs x8, s0", "b .LBB0_2"], "branch"),
        (["ldr x8, [x0]", "cbz x8, .LBB0_1"], None),
        (["fcmp s0, s1", "cmp x0, x1", "b.eq .LBB0_1"], None),
        (["fcmp s0, s1", "fcsel s2, s0, s1, eq", "str s2, [x0]"], None),
        (["fmov w8, s0", "udiv x9, x8, x1"], "divided"),
        (["str s0, [sp, #8]", "ldr x8, [sp, #8]", "cbz x8, .LBB0_1"], "branch"),
        (["ldrh w9, [x0]", "stp x8, x9, [sp]", "ldr x8, [sp, #8]", "cbz x8, .LBB0_1"], "branch"),
    ],
)
def test_instructions(lines, why):
    text = "\n".join(
        ["f:", *("\t" + x.replace(" ", "\t", 1) if ":" not in x else x for x in lines)]
    )
    found = code.findings("f", text + "\n.LBB0_1:\n\tret\n", "aarch64")
    assert [why in x.why for x in found] == ([] if why is None else [True])


@pytest.mark.parametrize("name", LEAKS)
def test_planted_leaks_show_in_the_time(name):
    leak = LEAKS[name]
    # Other processes may disturb a run, so it gets more chances, and more samples.
    found = (
        clock.compare(leak.run, leak.draw, {"fixed": leak.fix}, samples)[clock.ALL]
        for samples in (3000, 3000, 10_000, 30_000, 100_000)
    )
    assert any(abs(times.t()) > clock.CLEAR for times in found)


def test_equal_classes_are_not_told_apart():
    rng = np.random.default_rng(0)
    times = clock.Times(rng.normal(100, 5, 20_000).astype(int), rng.random(20_000) < 0.5)
    assert abs(times.t()) < clock.LIMIT
    slower = clock.Times(times.ns + 2 * times.is_fixed, times.is_fixed)
    assert slower.t() > clock.CLEAR
    course = slower.course()
    assert course[-1] == (20_000, slower.t())


def test_t_is_the_largest_of_all_crops():
    rng = np.random.default_rng(0)
    is_fixed = rng.random(3000) < 0.5
    ns = rng.integers(1000, 1100, 3000) + is_fixed
    ns[::100] += 10**6  # interruptions
    found = []
    for limit in np.percentile(ns, clock.PERCENTILES):
        x, y = (ns[(ns <= limit) & mine].astype(float) for mine in (is_fixed, ~is_fixed))
        error = np.sqrt(x.var(ddof=1) / len(x) + y.var(ddof=1) / len(y))
        found.append((x.mean() - y.mean()) / error)
    assert clock.Times(ns, is_fixed).t() == pytest.approx(max(found, key=abs))
    assert clock.Times(np.full(10, 5), np.arange(10) < 5).t() == 0.0


def test_every_class_has_its_share_of_samples():
    planned = clock.plan(CASES[0].draw, {"a": lambda x: x, "b": lambda x: x}, 4000)
    assert len(planned.pool) == 4 * clock.POOL
    compared = planned.split(np.arange(4000))
    assert list(compared) == [clock.ALL, "a", "b"]
    assert list(compared[clock.ALL].ns) == list(range(4000))
    assert compared[clock.ALL].is_fixed.mean() == pytest.approx(0.5, abs=0.03)
    for i, name in enumerate("ab"):
        # As many random ones, which are their partners, as of the class.
        assert compared[name].is_fixed.mean() == pytest.approx(0.5, abs=0.03)
        assert len(compared[name].ns) / 4000 == pytest.approx(0.5, abs=0.03)
        assert set(planned.order[compared[name].ns] // clock.POOL) == {i}
    first = planned.first(1000).split(np.arange(1000))
    assert len(first[clock.ALL].ns) == 1000


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_class_runs_in_every_case(case):
    drawn = case.draw(torch.Generator().manual_seed(0))
    for name in ("random", *case.classes):
        assert case.run(fixed(name, drawn)).shape == (1, 2, case.Sq, case.D)


def report_of(*launches: tuple[str, list[int], int]) -> str:
    """A report of Nsight Compute: kernels, how often each instruction ran, sectors."""
    lines = ["==PROF== Connected", '"ID","Kernel Name","Metric Name","Metric Value"']
    for i, (name, warps, sectors) in enumerate(launches):
        for metric, lanes in (("inst_executed", 1), ("thread_inst_executed", 32)):
            each = "; ".join(f"0x7f{j:x}0: {lanes * n:,}" for j, n in enumerate(warps))
            lines.append(f'"{i}","{name}","{metric}","{lanes * sum(warps):,} ({each})"')
        lines.append(f'"{i}","{name}","{counters.METRICS["sectors ld"]}","{sectors:,}"')
    return "\n".join(lines) + "\n"


def test_counters_are_compared_instruction_by_instruction():
    subject = Subject("s", lambda x: x["x"], lambda _: {}, {"zeros": lambda x: x})
    assert counters.classes_of(subject)[-1] == "zeros"
    same = ("f", [1, 2000, 3], 5000)
    # The second call waits longer, at instruction 1.
    others = [same, ("f", [1, 2100, 3], 5000), same, ("f", [1, 2000, 4], 5008)]
    launches = counters.read(report_of(("marker", [1], 0), *others))
    calls = list(counters.calls(launches, [subject]))
    report = counters.Report(calls, {("f", 3): frozenset({1})})
    assert counters.differing(report) == {
        "s": [
            "zeros: f: sectors ld 5000 -> 5008",
            "zeros: f: warps at instruction 2 3 -> 4",
            "zeros: f: threads at instruction 2 96 -> 128",
        ]
    }
    assert len(counters.differing(counters.Report(calls, {}))["s"]) == 5
    # Of a kernel whose waiting reads memory, only the sectors of each instruction count.
    polling = counters.Report(calls, report.waits, frozenset({("f", 3)}))
    assert len(counters.differing(polling)["s"]) == 2
    assert calls[0].launches[0].total("warps", {1}) == 4
    with pytest.raises(RuntimeError, match="3 launches for 4 calls"):
        list(counters.calls(launches[:-1], [subject]))


def test_sectors_belong_to_the_instruction_with_their_address():
    sectors = counters.EXECUTED["sectors"]
    text = report_of(("f", [1, 2, 3], 5)) + f'"0","f","{sectors}","9 (0x7f10: 4; 0x7f20: 5)"\n'
    (launch,) = counters.read(text)
    assert launch.executed["sectors"] == [0, 4, 5]


def run(*arguments: str):
    return CliRunner().invoke(app, ["audit", "timing", *arguments])


def test_the_command_takes_what_it_says():
    for arguments in (("--layer", "none"), ("--samples", "10"), ("--device", "tpu")):
        assert run(*arguments).exit_code == 2


def test_the_command_fails_where_a_secret_shows(monkeypatch):
    # Real times of planted leaks, held to the limit of kernels without one.
    monkeypatch.setattr(clock, "CLEAR", float("inf"))
    done = run("--layer", "time", "--planted", "--samples", "1000", "--json")
    assert done.exit_code == 1
    outcomes = json.loads(done.stdout)["outcomes"]
    assert {x["name"].split(":")[0] for x in outcomes} == set(LEAKS)
    assert not any(x["ok"] for x in outcomes)


def test_a_layer_that_cannot_run_is_skipped_and_no_failure(monkeypatch):
    monkeypatch.setattr(replay, "is_available", lambda: False)
    done = run("--layer", "memcheck", "--json")
    assert done.exit_code == 0
    [outcome] = json.loads(done.stdout)["outcomes"]
    assert outcome["skipped"]
    assert outcome["detail"]


def test_addresses_left_in_secret_tensors_are_none():
    """Memory that a tensor got may hold addresses still, which differ from class to class."""
    word = (0x1008).to_bytes(8, "little")
    table, secret = replay.Piece(0x1000, word * 2), replay.Piece(0x2000, word, is_secret=True)
    assert list(replay.Recorded(None, [table, secret]).links()) == [(0, 0, 0, 8), (0, 8, 0, 8)]
