"""The command `lockstep audit distributed`. What is heavy to import is imported inside it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lockstep.audit.cli_options import check_device, dtype_of
from lockstep.output.command import Json, ends_with_status_2, print_json
from lockstep.output.console import BAD, GOOD, NO, QUIET, YES, table

if TYPE_CHECKING:
    from lockstep.audit.distributed import Case

DTYPES = ("fp16", "bf16", "fp32")


def distributed(
    method: Annotated[
        list[str] | None, typer.Option(help="heads, gather, ring; all that run, if not given.")
    ] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(help="full, causal, window, behind, both; all, if not given."),
    ] = None,
    kernel: Annotated[
        str | None, typer.Option(help="One kernel by name; what dispatch takes, if not given.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; cuda where there is one, if not given.")
    ] = None,
    seq: Annotated[int, typer.Option(min=1, help="Tokens of the whole sequence.")] = 1024,
    heads: Annotated[int, typer.Option(min=1, help="Query heads.")] = 8,
    kv_heads: Annotated[int, typer.Option(min=1, help="Key and value heads.")] = 4,
    head_dim: Annotated[int, typer.Option(min=1, help="Size of a head.")] = 64,
    dtype: Annotated[
        str | None,
        typer.Option(help="fp16, bf16, fp32; fp32 on a CPU and bf16 on a GPU, if not given."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare attention on several ranks with one process, bit by bit: run it under torchrun.

    As in `torchrun --nproc-per-node 4 --no-python lockstep audit distributed`. Results, lse and
    every gradient, for each method, contiguous and balanced shards, and five masks. A kernel that
    does not promise query_invariant is audited with the method heads alone. Rank 0 prints.
    Exit status 1 on every rank if a bit differs on any, which is printed with rank, place and both
    bit patterns; 2 if nothing can run.
    """
    with ends_with_status_2(ValueError, NotImplementedError):
        found = _prepare(method, mask, kernel, device, dtype, (seq, heads, kv_heads, head_dim))
    rows, refused, ranks = _run(found)
    import torch.distributed as dist

    ok = all(not row["differences"] for row in rows)
    if dist.get_rank() == 0:
        result = {"ranks": ranks, "ok": ok, "cases": rows, "not_audited": refused}
        if as_json:
            print_json(result)
        else:
            _report(result, Console())
    dist.destroy_process_group()
    raise typer.Exit(0 if ok else 1)


def _prepare(
    method: list[str] | None,
    mask: list[str] | None,
    kernel: str | None,
    device: str | None,
    dtype: str | None,
    sizes: tuple[int, ...],
) -> list[Case]:
    """The cases. Raises ValueError where nothing can run."""
    import torch

    from lockstep.audit.distributed import MASKS, cases, without_invariance
    from lockstep.distributed.methods import METHODS, by_name

    if "RANK" not in os.environ:
        raise ValueError(
            "there are no ranks: run it as torchrun --nproc-per-node 2 --no-python lockstep audit "
            "distributed"
        )
    names = tuple(by_name(name).name for name in method or [m.name for m in METHODS])
    masks = tuple(mask or MASKS)
    for name in masks:
        if name not in MASKS:
            raise ValueError(f"--mask takes one of {', '.join(MASKS)}, got {name!r}")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    check_device(device, indexed=False)
    kind = dtype_of(dtype or ("fp32" if device == "cpu" else "bf16"), DTYPES)
    if device == "cuda":
        # Several ranks may share a GPU; NCCL would refuse, gloo does not.
        device = f"cuda:{int(os.environ['LOCAL_RANK']) % torch.cuda.device_count()}"
        torch.cuda.set_device(device)
    S, Hq, Hkv, D = sizes
    if Hq % Hkv:
        raise ValueError(f"--heads takes a multiple of --kv-heads, got {Hq} and {Hkv}")
    call = {"dtype": kind, "device": device, "kernel": kernel}
    found = list(cases(names, masks, S=S, Hq=Hq, Hkv=Hkv, D=D, **call))
    if kernel is None or not without_invariance(found[0]):
        return found
    found = [replace(case, query_invariant=False) for case in found if case.method == "heads"]
    if not found:
        raise ValueError(f"--method takes heads with {kernel}: it is not query_invariant here")
    return found


def _run(found: list[Case]) -> tuple[list[dict[str, Any]], dict[str, str], int]:
    """A row per case, why methods refuse, how many ranks there are: the same on every rank."""
    import torch
    import torch.distributed as dist

    from lockstep.audit.distributed import compare

    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    alone = found[0].device != "cpu" and local_ranks <= torch.cuda.device_count()
    dist.init_process_group("nccl" if alone else "gloo")
    group = dist.group.WORLD
    assert group is not None
    rows, refused = [], {}
    for case in found:
        if case.method in refused:
            continue
        try:
            mine = compare(case, group)
        except NotImplementedError as error:
            refused[case.method] = str(error)
            continue
        all_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(all_ranks, None if mine is None else str(mine))
        differences = {str(rank): text for rank, text in enumerate(all_ranks) if text is not None}
        rows.append({"case": str(case), "differences": differences})
    return rows, refused, dist.get_world_size()


def _report(result: dict[str, Any], console: Console) -> None:
    console.print(Text(f"{result['ranks']} ranks beside one process", style=QUIET))
    made = table("case", "same bits")
    for row in result["cases"]:
        made.add_row(row["case"], NO if row["differences"] else YES)
    console.print(made)
    for name, reason in result["not_audited"].items():
        console.print(Text(f"{name} is not audited: {reason}", style=QUIET))
    failed = next((row for row in result["cases"] if row["differences"]), None)
    if failed is None:
        console.print(Text("Every bit is the same.", style=GOOD))
        return
    rank, difference = next(iter(failed["differences"].items()))
    console.print(Text(f"{failed['case']}, rank {rank}", style=BAD))
    console.print(difference, soft_wrap=True, highlight=False)
