"""Tables of the machine's counts against a GPU's."""

from __future__ import annotations

import json

import pytest

from lockstep.bench.counter_tables import COUNTS, agreement_block, counters_block
from lockstep.output.results import where_on_gpu

ENVIRONMENT = {
    "hardware": {"gpus": ["NVIDIA X1"]},
    "versions": {"torch": "2.13.0"},
    "commit": {"hash": "0123456789abcdef", "dirty": False},
}


def row(name, *, bitwise=True, wavefronts=7, verdict="equal", driver=4):
    return {
        "name": name,
        "bitwise": bitwise,
        "largest_error": 0.0 if bitwise else 1.5e-7,
        "machine": {"global_requests": 40, "global_sectors": 1000, "shared_wavefronts": 7},
        "gpu": {"global_requests": 40, "global_sectors": 1000, "shared_wavefronts": wavefronts},
        "blocks_per_sm": {"closed_form": 4, "driver": driver},
        "known_difference": "",
        **{f"{count}_verdict": "equal" for count in COUNTS},
        "shared_wavefronts_verdict": verdict,
    }


def save(directory, suite, rows):
    run = {"suite": suite, "date": "2026-01-02", "environment": ENVIRONMENT, "rows": rows}
    (directory / f"{suite}.json").write_text(json.dumps(run), encoding="utf-8")


def test_counts_that_differ_come_with_their_reason(tmp_path):
    save(tmp_path, "some-vs-gpu", [row("a kernel", wavefronts=5, verdict="merged")])
    line = counters_block("some-vs-gpu")(tmp_path).splitlines()[2]
    assert line == "| a kernel | same bits | 1,000 | 7 / 5 | 4 | the compiler merges accesses |"


def test_agreement_is_counted_and_the_rest_is_listed(tmp_path):
    rows = [
        row("equal"),
        row("rounded", bitwise=False),
        row("merged", wavefronts=5, verdict="merged", driver=3),
    ]
    save(tmp_path, "simt-vs-gpu", rows)
    text = agreement_block(tmp_path)
    assert "| outputs equal, bit for bit | 2 of 3 |" in text
    assert "| outputs within 1.5e-07 | 1 of 3 |" in text
    assert "| global sectors equal | 3 of 3 |" in text
    assert "| shared wavefronts equal | 2 of 3 |" in text
    assert "| blocks per multiprocessor as the driver says | 2 of 3 |" in text
    listed = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| ")]
    assert "| merged" in listed
    assert "| rounded" not in listed


@pytest.mark.parametrize("block", [agreement_block, counters_block("simt-vs-gpu")])
def test_without_results_the_table_says_so(tmp_path, block):
    assert block(tmp_path) == "Not measured yet."


def test_the_caption_says_if_the_tree_was_changed():
    run = {"date": "2026-01-02", "environment": ENVIRONMENT}
    assert where_on_gpu(run) == "NVIDIA X1, torch 2.13.0, 2026-01-02, commit 0123456"
    run["environment"] = ENVIRONMENT | {"commit": {"hash": "0123456789abcdef", "dirty": True}}
    assert where_on_gpu(run).endswith("commit 0123456 with local changes")
