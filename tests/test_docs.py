"""The examples in the README and the docs run and give what they say."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep import dispatch

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_example_runs(page):
    code = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(code[0], page, "exec"), {})


def test_the_readme_names_every_kernel_and_what_it_claims():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| `")]
    claims = {row[0].strip("`"): row[3] for row in rows if len(row) == 4}
    assert list(claims) == [kernel.name for kernel in dispatch.KERNELS]
    for kernel in dispatch.KERNELS:
        claimed = [
            name.replace("_", "-")
            for name in ("deterministic", "batch_invariant", "query_invariant", "constant_time")
            if getattr(kernel, name)
        ]
        assert claims[kernel.name] == (", ".join(claimed) or "–")


def test_what_docs_index_shows_is_what_is_printed():
    text = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").replace("```", "")
    examples = doctest.DocTestParser().get_doctest(
        text, {"lockstep": lockstep, "torch": torch}, "docs/index.md", None, 0
    )
    assert examples.examples
    assert doctest.DocTestRunner(verbose=False).run(examples).failed == 0


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)[^)]*\)", prose):
        assert (page.parent / target).exists(), target
