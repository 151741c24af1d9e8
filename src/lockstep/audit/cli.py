"""`lockstep audit`. What is heavy to import is imported inside the commands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lockstep.audit import distributed_cli, exact_cli, model_cli
from lockstep.audit.cli_options import check_device, dtype_of
from lockstep.audit.timing import cli as timing_cli
from lockstep.output.command import Json, ends_with_status_2, errors_by_option, print_json
from lockstep.output.console import BAD, GOOD, NO, OURS, QUIET, YES, progress, table

if TYPE_CHECKING:
    from lockstep.audit.calls import Shape
    from lockstep.audit.checks import Outcome
    from lockstep.kernels.kernel import Kernel

app = typer.Typer(help="Test the claims of the kernels on this machine.", no_args_is_help=True)

# By the field of `Shape` that they set.
OPTIONS = {
    "B": "--batch",
    "Hq": "--heads",
    "Hkv": "--kv-heads",
    "S": "--seq",
    "D": "--head-dim",
    "repeats": "--repeats",
}

app.command()(exact_cli.exact)
app.command()(timing_cli.timing)
app.command()(distributed_cli.distributed)
app.command()(model_cli.model)


@app.command()
def bits(
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda where there is one, if not given.")
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="One kernel by name; all that run here, if not given.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Sequences in a batch.")] = 4,
    heads: Annotated[int, typer.Option(help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(help="Key and value heads.")] = 2,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 333,
    head_dim: Annotated[int, typer.Option(help="Size of a head.")] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp16, bf16, fp32; fp32 on a CPU and bf16 on a GPU, if not given."),
    ] = None,
    repeats: Annotated[int, typer.Option(help="How often one call is made.")] = 20,
    as_json: Json = False,
) -> None:
    """Compare results bit by bit: repeated, alone and in a batch, packed, paged, in chunks.

    Each kernel is held to what it claims, forward and backward. Exit status 1 at the first
    difference, which is printed with its place and both bit patterns; 2 if nothing can run.
    """
    with ends_with_status_2(ValueError):
        shape, kernels, others = _prepare(
            device, kernel, dtype, (batch, heads, kv_heads, seq, head_dim, repeats)
        )
    outcomes = _run(shape, kernels, Console(stderr=True))
    ok = all(outcome.ok for outcome in outcomes)
    if as_json:
        checks = [outcome.as_json() for outcome in outcomes]
        found = {"shape": _shape_json(shape), "ok": ok, "checks": checks, "not_audited": others}
        print_json(found)
    else:
        _report(shape, outcomes, others, Console())
    raise typer.Exit(0 if ok else 1)


def _prepare(
    device: str | None,
    name: str | None,
    dtype: str | None,
    sizes: tuple[int, int, int, int, int, int],
) -> tuple[Shape, list[Kernel], dict[str, str]]:
    """The shape, the kernels to audit, and why each other kernel is not audited.

    Raises ValueError where nothing can run."""
    import torch

    from lockstep.audit.calls import Shape
    from lockstep.dispatch import KERNELS

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device)
    dtype = dtype or ("bf16" if torch.device(device).type == "cuda" else "fp32")
    kind = dtype_of(dtype)
    with errors_by_option(OPTIONS):
        shape = Shape(device, kind, *sizes)
    names = [k.name for k in KERNELS]
    if name is not None and name not in names:
        raise ValueError(f"--kernel takes one of {', '.join(names)}, got {name!r}")
    able, others = [], {}
    for candidate in KERNELS:
        if name in (None, candidate.name):
            refusal = _refusal(candidate, shape)
            if refusal is None:
                able.append(candidate)
            else:
                others[candidate.name] = refusal
    if not able:
        reasons = "; ".join(f"{other}: {reason}" for other, reason in others.items())
        raise ValueError(f"no kernel to audit: {reasons}")
    return shape, able, others


def _refusal(kernel: Kernel, shape: Shape) -> str | None:
    """The reason why a kernel cannot be audited: it refuses the dense call, or claims nothing."""
    import torch

    from lockstep.problem import Options, Tensors, describe

    def empty(H: int) -> torch.Tensor:
        return torch.empty(
            shape.B, H, shape.S, shape.D, dtype=shape.dtype, device=torch.device(shape.device)
        )

    problem = describe(Tensors(empty(shape.Hq), empty(shape.Hkv), empty(shape.Hkv)), Options())
    reason = kernel.supports(problem)
    claims = kernel.deterministic or kernel.batch_invariant or kernel.query_invariant
    return reason if reason is not None or claims else "claims nothing about bits"


def _run(shape: Shape, kernels: list[Kernel], aside: Console) -> list[Outcome]:
    from lockstep.audit import batch_invariance, determinism
    from lockstep.audit.checks import audit

    checks = (*determinism.CHECKS, *batch_invariance.CHECKS)
    outcomes = []
    with progress(aside, len(checks) * len(kernels)) as steps:
        upcoming = iter([(k.name, c.name) for k in kernels for c in checks])
        steps.say(": ".join(next(upcoming)))
        for outcome in audit(checks, shape, kernels):
            outcomes.append(outcome)
            steps.done()
            steps.say(": ".join(next(upcoming, ("", ""))))
    return outcomes


def _report(
    shape: Shape, outcomes: list[Outcome], others: dict[str, str], console: Console
) -> None:
    console.print(Text(_shape_text(shape), style=QUIET))
    for name in dict.fromkeys(outcome.kernel for outcome in outcomes):
        console.print()
        console.print(Text(name, style=OURS))
        console.print(_table([outcome for outcome in outcomes if outcome.kernel == name]))
    console.print()
    for name, reason in others.items():
        console.print(Text(f"{name} is not audited: {reason}", style=QUIET))
    failed = next((outcome for outcome in outcomes if not outcome.ok), None)
    if failed is None:
        console.print(Text("Every bit is the same.", style=GOOD))
        return
    console.print(Text(f"{failed.kernel}: {failed.check}: {failed.what}", style=BAD))
    console.print(str(failed.difference), soft_wrap=True, highlight=False)


def _table(outcomes: list[Outcome]) -> Table:
    made = table("claim", "check", "compared", "", right=("compared",))
    made.columns[-1].no_wrap = False
    claim = None
    for outcome in outcomes:
        made.add_row(
            outcome.claim if outcome.claim != claim else "",
            outcome.check,
            str(outcome.comparisons or ""),
            _verdict(outcome),
        )
        claim = outcome.claim
    return made


def _verdict(outcome: Outcome) -> Text:
    if outcome.skipped is not None:
        return Text(outcome.skipped, style=QUIET)
    mark = YES if outcome.ok else NO
    if not outcome.left_out:
        return mark
    return Text.assemble(mark, (f" left out: {'; '.join(outcome.left_out)}", QUIET))


def _shape_text(shape: Shape) -> str:
    sizes = f"B {shape.B}, heads {shape.Hq}/{shape.Hkv}, S {shape.S}, D {shape.D}"
    return f"{sizes}, {_dtype_name(shape)} on {shape.device}, {shape.repeats} repeats"


def _shape_json(shape: Shape) -> dict[str, Any]:
    return {**vars(shape), "dtype": _dtype_name(shape)}


def _dtype_name(shape: Shape) -> str:
    return str(shape.dtype).removeprefix("torch.")
