"""The `lockstep` command. What is heavy to import is imported inside the commands that need it."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

from lockstep.audit import cli as audit_cli
from lockstep.bench import cli as bench_cli
from lockstep.commands import plan_context, warm_up
from lockstep.ladder import cli as ladder_cli
from lockstep.ladder import sweep as ladder_sweep
from lockstep.ladder.claims import cli as claims_cli
from lockstep.output.command import (
    Commands,
    Json,
    ends_with_status_2,
    errors_by_option,
    print_json,
    run,
)
from lockstep.report import cli as report_cli

app = typer.Typer(
    name="lockstep",
    cls=Commands,
    help="Exact attention for PyTorch: fast, bitwise reproducible, see-through.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.add_typer(bench_cli.app, name="bench")
app.add_typer(audit_cli.app, name="audit")


class Plans(TyperGroup):
    """`lockstep plan context`; everything else is about rungs, as in `lockstep plan naive`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        named = args and args[0] in (*self.commands, "--help")
        return super().parse_args(ctx, args if named else ["rungs", *args])


DISTRIBUTION = "lockstep-attention"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lockstep {metadata.version(DISTRIBUTION)}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    pass


@app.command()
def demo() -> None:
    """Show on this machine that attention is exact, bitwise reproducible and fast.

    Takes less than a minute. Exit status 1 if a check fails.
    """
    from lockstep import demo

    raise typer.Exit(0 if demo.run(Console()) else 1)


@app.command()
def doctor(as_json: Json = False) -> None:
    """Say what hardware, versions and kernels are here, and why a kernel cannot run."""
    from lockstep.commands import doctor

    facts = doctor.examine()
    if as_json:
        print_json(facts)
    else:
        doctor.report(facts, Console())


app.command("warm-up")(warm_up.warm_up)


@app.command()
def hub_layout(
    repository: Annotated[Path, typer.Argument(help="The folder of the repository to write.")],
    backend: Annotated[
        str, typer.Option(help="cuda, or cpu to try it on a machine without a GPU.")
    ] = "cuda",
    as_json: Json = False,
) -> None:
    """Write Lockstep as a kernel of the Hugging Face hub: build/torch-cuda/ and its metadata.json.

    Give the repository a name like lockstep-flash-attn2: transformers' continuous batching takes
    names with "flash" in them, and reads the version of the calls off their end.
    """
    from lockstep.integrations import hub

    with (
        ends_with_status_2(ValueError, OSError),
        errors_by_option({"backend": "--backend"}),
    ):
        layout = hub.write_layout(repository, backend)
    facts = {**layout._asdict(), "folder": str(layout.folder)}
    if as_json:
        print_json(facts)
    else:
        typer.echo(f"{layout.folder}: {layout.files} files, imported as {layout.id}")


app.command()(ladder_cli.ladder)
plans = typer.Typer(
    cls=Plans,
    help="Say on paper what rungs, or attention on many GPUs, would take.\n\n"
    "Plain `lockstep plan`, or `lockstep plan RUNG`, is `lockstep plan rungs`.",
)
plans.command("rungs")(ladder_cli.plan)
plans.command()(plan_context.context)
app.add_typer(plans, name="plan")
app.command()(ladder_sweep.sweep)
app.command()(claims_cli.claims)
app.command(context_settings={"obj": report_cli.write_kernels})(ladder_cli.trace)
app.command()(ladder_cli.show)
app.command()(report_cli.report)


def command_line() -> NoReturn:
    """The entry point of the script `lockstep`."""
    run(app)


if __name__ == "__main__":
    command_line()
