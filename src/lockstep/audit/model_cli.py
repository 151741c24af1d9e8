"""The command `lockstep audit model`. What is heavy to import is imported inside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lockstep.audit.cli_options import check_device, dtype_of
from lockstep.output.command import Json, ends_with_status_2, print_json
from lockstep.output.console import BAD, NO, QUIET, YES

if TYPE_CHECKING:
    from lockstep.audit.model_bits import Finding


def model(
    path: Annotated[
        Path,
        typer.Argument(
            help="A folder with config.json, with or without weights, or a config.json itself."
        ),
    ],
    attention: Annotated[
        str, typer.Option(help="attn_implementation: lockstep, sdpa, eager, ….")
    ] = "lockstep",
    batch: Annotated[int, typer.Option(help="Sequences in the batch.")] = 5,
    seq: Annotated[int, typer.Option(help="Tokens of a sequence.")] = 37,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    seed: Annotated[
        int, typer.Option(help="Of the tokens, and of weights that are not there.")
    ] = 0,
    as_json: Json = False,
) -> None:
    """Run a model of transformers alone, in a batch, padded and in chunks, and compare bits.

    Names the first module and operator whose bits differ, and what would help. Without weights in
    the folder they are random. Exit status 1 if anything differs, 2 if the model cannot be run.
    """
    with ends_with_status_2(ValueError, OSError, ImportError):
        found = _audit(path, attention, batch, seq, dtype, device, seed)
    ok = all(finding.same for finding in found)
    if as_json:
        print_json({"ok": ok, "attention": attention, "findings": [x.as_json() for x in found]})
    else:
        _report(found, Console())
    raise typer.Exit(0 if ok else 1)


def _audit(
    path: Path, attention: str, batch: int, seq: int, dtype: str, device: str, seed: int
) -> list[Finding]:
    import torch

    from lockstep.audit.model_bits import model as audit

    check_device(device)
    kind = dtype_of(dtype)
    folder = path.parent if path.is_file() else path
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} has no config.json")
    torch.manual_seed(seed)
    loaded = _load(folder, attention, kind).to(device)
    if loaded.main_input_name != "input_ids":
        raise ValueError(
            f"{type(loaded).__name__} takes {loaded.main_input_name} and no tokens: call "
            "lockstep.audit.model with a batch of them"
        )
    names = ["input_ids"] + ["decoder_input_ids"] * loaded.config.is_encoder_decoder
    tokens = torch.randint(1, loaded.config.get_text_config().vocab_size, (batch, seq))
    try:
        return audit(loaded, dict.fromkeys(names, tokens.to(device)))
    except (IndexError, RuntimeError, TypeError) as error:
        raise ValueError(
            f"{type(loaded).__name__} does not run with --batch {batch} --seq {seq}: {error}"
        ) from error


def _load(folder: Path, attention: str, dtype: Any) -> Any:
    try:
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
    except ImportError:
        raise ImportError(
            "lockstep audit model needs transformers: pip install lockstep-attention[hf]"
        ) from None
    from lockstep.integrations import transformers as integration

    integration.register()
    config = AutoConfig.from_pretrained(folder)
    known = type(config) in AutoModelForCausalLM._model_mapping
    loader: Any = AutoModelForCausalLM if known else AutoModel
    options = {"attn_implementation": attention, "dtype": dtype}
    has_weights = any(folder.glob("*.safetensors")) or any(folder.glob("*.bin"))
    if has_weights:
        return loader.from_pretrained(folder, **options)
    return loader.from_config(config, **options)


def _report(found: list[Finding], console: Console) -> None:
    for finding in found:
        if finding.module is None:
            console.print(Text.assemble(YES, f" {finding.circumstance}: the same bits"))
            continue
        where = finding.operator or finding.module
        inside = "" if finding.operator is None else f", {finding.operator.name}"
        console.print(
            Text.assemble(
                NO,
                f" {finding.circumstance}: first in {finding.module.path} ",
                (f"({finding.module.name}{inside})", BAD),
                f", {where.elements} of {where.of} numbers, by up to {where.largest:.2g}",
            )
        )
    for remedy in dict.fromkeys(x.remedy for x in found if x.remedy):
        console.print(Text(f"What would help: {remedy}.", style=QUIET))
