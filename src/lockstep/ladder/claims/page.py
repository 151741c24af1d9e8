"""The ledger: all claims with their verdicts, for a terminal, a script or the documentation.

python -m lockstep.ladder.claims.page            rewrite docs/claims.md
python -m lockstep.ladder.claims.page --check    exit status 1 if it would change
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable
from itertools import groupby

from rich.table import Table

from lockstep.output import results

from . import CLAIMS, DEPENDS, DIFFERS, HOLDS, UNMEASURED, Claim, Finding
from .evidence import where

COLOURS = {HOLDS: "green", DIFFERS: "red", DEPENDS: "yellow", UNMEASURED: "dim"}
PAGE = "docs/claims.md"
INTRODUCTION = """\
# Claims, put to the test

Five documents describe the kernels that became the lower and middle rungs of the ladder: how work
is spread over a GPU, a softmax by tree reductions, keys split over blocks, warps with matrix
fragments, and the design of a constant-time kernel with a block per tile. This page compares their
figures with ours. Ours come from five *lenses*:

- **plan**: the closed form of the rung, for the problem that the document names;
- **trace**: what the lockstep machine counts, on one head and few tiles, which is enough for
  ratios and counts per tile; *depth* is a block's critical path in warp instructions, not time;
- **compiler**: registers, as NVRTC compiles the rung for Hopper;
- **bench**: a time measured on a GPU, read from `benchmarks/results`; shares of time come from a
  build that reads the clock around each phase;
- **arithmetic**: the document's own numbers, computed again.

Verdicts are computed from these figures. *Holds*: ours is in the range that the document's figure
and its tolerance allow. *Differs*: it is not; the factor is ours over the document's. *Depends*: it
is under one condition and not under another. *Not measured*: the results do not have the
measurement yet.

One statement has no figure. The split-KV document takes its method to be that of the second
FlashAttention paper. In that paper a block of the forward pass has a tile of queries and walks over
all of its keys; keys split over blocks, with a reduction after them, came later, as Flash-Decoding.

`lockstep claims` prints the same tables; `python -m lockstep.ladder.claims.page` writes this page.
"""


def findings(claims: Iterable[Claim] = CLAIMS) -> list[Finding]:
    """Test claims one after the other."""
    return [claim.test() for claim in claims]


def summary(found: Iterable[Finding]) -> str:
    """How many claims hold, differ, depend."""
    counts = Counter(finding.verdict for finding in found)
    words = {HOLDS: "hold", DIFFERS: "differ", DEPENDS: "depend", UNMEASURED: UNMEASURED}
    return ", ".join(f"{counts[v]} {word}" for v, word in words.items() if counts[v])


def by_document(found: Iterable[Finding]) -> dict[str, str]:
    """The same for each document."""
    found = list(found)
    names = dict.fromkeys(finding.claim.document for finding in found)
    return {name: summary(f for f in found if f.claim.document == name) for name in names}


def ledger(found: list[Finding]) -> Table:
    """The ledger as a table for the terminal."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column()
    for document, group in groupby(found, lambda finding: finding.claim.document):
        table.add_row("", f"[bold]{document}[/]")
        for finding in group:
            claim = finding.claim
            text = f"{claim.says}\nfigure {claim.figure.shown}; {claim.lens}: {_ours(finding)}"
            if finding.explanation:
                text += f"\n[dim]{finding.explanation}[/]"
            table.add_row(f"[{COLOURS[finding.verdict]}]{finding.verdict}[/]", text)
    return table


def _ours(finding: Finding) -> str:
    return f"{finding.ours} {finding.claim.unit}" if finding.readings else "–"


def page(found: list[Finding]) -> str:
    """The ledger as a page of the documentation."""
    parts = [INTRODUCTION, f"Of {len(found)} claims: {summary(found)}.\n"]
    parts += ["| document | verdicts |\n|---|---|"]
    parts[-1] += "".join(f"\n| {name} | {text} |" for name, text in by_document(found).items())
    parts[-1] += "\n"
    for suite in ("ladder", "ladder-phases", "split-kv"):
        if where(suite):
            parts.append(f"Times of the suite `{suite}`: {where(suite)}.\n")
    for document, group in groupby(found, lambda finding: finding.claim.document):
        parts.append(f"## The {document} document\n")
        parts.append(
            "| where | it says | figure | we get | lens | verdict |\n|---|---|---|---|---|---|"
        )
        parts[-1] += "".join("\n" + _row(finding) for finding in group) + "\n"
    return "\n".join(parts)


def _row(finding: Finding) -> str:
    claim = finding.claim
    verdict = f"**{finding.verdict}**"
    if finding.explanation:
        verdict += f" {finding.explanation}"
    cells = (claim.part, claim.says, claim.figure.shown, _ours(finding), claim.lens, verdict)
    return f"| {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write docs/claims.md.")
    parser.add_argument("--check", action="store_true", help="only say whether it is current")
    check = parser.parse_args().check
    root = results.checkout()
    if root is None:
        sys.exit("docs/claims.md belongs to a checkout; this package is installed elsewhere")
    target, text = root / PAGE, page(findings())
    current = target.exists() and target.read_text(encoding="utf-8") == text
    if check:
        print(f"{PAGE} is {'current' if current else 'out of date'}")
        return 0 if current else 1
    target.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
