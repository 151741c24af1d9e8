"""Command `claims`: the ledger on the terminal. For a Typer application to mount."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from lockstep.output.command import Json, print_json
from lockstep.output.console import progress


def claims(
    document: Annotated[str, typer.Option(help="Only documents whose name contains this.")] = "",
    verdict: Annotated[
        str, typer.Option(help="Only this verdict: holds, differs, depends or not measured.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Hold the claims of five documents on attention kernels against plan, trace and bench.

    Takes less than a minute; needs no GPU, since measured times are read from results files.
    Exit status 2 for a document or a verdict that there is not.
    """
    from . import CLAIMS, DEPENDS, DIFFERS, HOLDS, UNMEASURED
    from .page import by_document, ledger, summary

    verdicts = (HOLDS, DIFFERS, DEPENDS, UNMEASURED)
    if verdict and verdict not in verdicts:
        raise typer.BadParameter(
            f"'{verdict}', takes {', '.join(verdicts)}", param_hint="--verdict"
        )
    chosen = [claim for claim in CLAIMS if document.lower() in claim.document.lower()]
    if not chosen:
        names = dict.fromkeys(claim.document for claim in CLAIMS)
        raise typer.BadParameter(
            f"'{document}', there are {', '.join(names)}", param_hint="--document"
        )
    found = []
    with progress(Console(stderr=True), len(chosen)) as steps:
        for claim in chosen:
            steps.say(claim.document)
            found.append(claim.test())
            steps.done()
    if verdict:
        found = [finding for finding in found if finding.verdict == verdict]
    if as_json:
        print_json([finding.as_json() for finding in found])
        return
    console = Console()
    console.print(ledger(found))
    console.print()
    for name, text in by_document(found).items():
        console.print(f"{name}: {text}")
    console.print(f"{len(found)} claims: {summary(found)}")
