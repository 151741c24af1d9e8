"""Command `claims`: the ledger on the terminal. For a Typer application to mount."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn


def claims(
    document: Annotated[str, typer.Option(help="Only documents whose name contains this.")] = "",
    verdict: Annotated[
        str, typer.Option(help="Only this verdict: holds, differs, depends or not measured.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a script.")] = False,
) -> None:
    """Hold the claims of five documents on attention kernels against plan, trace and bench.

    Takes less than a minute; needs no GPU, since measured times are read from results files.
    Exit status 2 for a document or a verdict that there is not.
    """
    from . import CLAIMS, DEPENDS, DIFFERS, HOLDS, UNMEASURED, Claim
    from .page import by_document, findings, ledger, summary

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
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("claims", total=len(chosen))

        def told(claim: Claim) -> None:
            progress.update(task, advance=1, description=claim.document)

        found = findings(chosen, told)
    if verdict:
        found = [finding for finding in found if finding.verdict == verdict]
    if as_json:
        typer.echo(json.dumps([finding.as_json() for finding in found], indent=1))
        return
    console = Console()
    console.print(ledger(found))
    console.print()
    for name, text in by_document(found).items():
        console.print(f"{name}: {text}")
    console.print(f"{len(found)} claims: {summary(found)}")
