"""`lockstep doctor`: hardware and versions, which kernels can run, and why the others cannot."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text

from lockstep import environment
from lockstep.output.console import OURS, QUIET
from lockstep.output.formats import dtype_name

CLAIMS = ("deterministic", "batch_invariant", "query_invariant", "constant_time")


def examine() -> dict[str, Any]:
    """Everything `lockstep doctor` says, ready for JSON."""
    return {
        **environment.describe(),
        "kernels": kernels(),
        "compile_cache": compile_cache(),
    }


def kernels() -> list[dict[str, Any]]:
    """Every kernel with its claims, and per device and dtype None or the reason for refusing.

    The reasons are those of a plain problem (heads of 64, causal, no options): what a kernel
    refuses there, it refuses because of the device, the dtype or something that is not installed.
    """
    import torch

    from lockstep.dispatch import KERNELS
    from lockstep.problem import Options, Tensors, describe

    devices = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    found = []
    for kernel in KERNELS:
        refusals: dict[str, str | None] = {}
        for device in devices:
            for dtype in dtypes:
                q = torch.empty(1, 8, 128, 64, dtype=dtype, device=device)
                problem = describe(Tensors(q, q, q), Options(causal=True))
                refusals[f"{device} {dtype_name(dtype)}"] = kernel.supports(problem)
        claims = {claim: getattr(kernel, claim) for claim in CLAIMS}
        differentiable = kernel.prepare_backward is not None
        found.append(
            {"name": kernel.name, "backward": differentiable, **claims, "refusals": refusals}
        )
    return found


def compile_cache() -> dict[str, Any]:
    """The directories of compiled CPU kernels, the number of kernels there, and their size.

    `directory` is where new kernels are saved, None where no directory can be written to.
    """
    from lockstep.kernels.cpu.compiler import store

    directory = store.home()
    sizes = [path.stat().st_size for path in store.files()]
    return {
        "directory": None if directory is None else str(directory),
        "searched": [str(directory) for directory in store.directories()],
        "kernels": len(sizes),
        "bytes": sum(sizes),
    }


def report(facts: dict[str, Any], console: Console) -> None:
    """Print what `examine` found."""
    hardware, commit, cache = facts["hardware"], facts["commit"], facts["compile_cache"]
    _heading(console, "Machine")
    threads = facts["threads"]
    machine = {
        "CPU": f"{hardware['cpu']}, {hardware['arch']}, {hardware['simd']}",
        "cores": f"{hardware['cores']} usable, {threads} thread{'s' * (threads != 1)} in use",
        "memory": f"{hardware['memory_gb']} GiB",
        "GPU": ", ".join(hardware["gpus"]) or "none that PyTorch can use",
        "system": facts["system"],
    }
    _report_lines(console, machine)
    _heading(console, "Versions")
    versions = {
        name: version or "not installed" for name, version in environment.versions().items()
    }
    if commit:
        changed = " with local changes" if commit["dirty"] else ""
        versions["commit"] = commit["hash"][:12] + changed
    _report_lines(console, versions)
    _heading(console, "Kernels")
    _report_kernels(facts["kernels"], console)
    _heading(console, "Compiled code on disk")
    _report_lines(console, _cache_lines(cache))


def _cache_lines(cache: dict[str, Any]) -> dict[str, str]:
    if cache["kernels"]:
        holds = f"{cache['kernels']} kernels, {cache['bytes'] / 2**10:.0f} KiB"
    elif cache["directory"]:
        holds = "nothing yet: the first call compiles, later processes load the result"
    else:
        holds = "nothing: every process compiles anew"
    where = cache["directory"] or "nowhere: no directory can be written to"
    lines = {"holds": holds, "new ones go": where}
    if not cache["directory"]:
        lines["tried"] = ", ".join(cache["searched"])
    return lines


def _heading(console: Console, text: str) -> None:
    console.print()
    console.print(Text(text, style="bold"))


def _report_lines(console: Console, lines: dict[str, str]) -> None:
    width = max(map(len, lines))
    for name, value in lines.items():
        style = QUIET if value == "not installed" else ""
        line = Text.assemble((f"  {name:<{width}}  ", QUIET), (value, style))
        console.print(line, soft_wrap=True)


def _report_kernels(kernels: list[dict[str, Any]], console: Console) -> None:
    """Each kernel in order of preference: where it runs, what it claims, why it does not run."""
    for kernel in kernels:
        able = [where for where, reason in kernel["refusals"].items() if reason is None]
        style = OURS if able else QUIET
        runs = f"runs {_grouped(able)}" if able else "cannot run here"
        console.print(Text.assemble(("  " + kernel["name"], style), f"  {runs}"))
        claims = [claim.replace("_", "-") for claim in CLAIMS if kernel[claim]]
        if claims:
            console.print(Text.assemble(("    claims   ", QUIET), ", ".join(claims)))
        for reason, places in _reasons(kernel["refusals"]).items():
            line = Text.assemble(("    refuses  ", QUIET), f"{_grouped(places)}: {reason}")
            console.print(line, soft_wrap=True)


def _reasons(refusals: dict[str, str | None]) -> dict[str, list[str]]:
    """Devices and dtypes by the reason they are refused for, without its last part, ", got …"."""
    places: dict[str, list[str]] = {}
    for where, reason in refusals.items():
        if reason is not None:
            places.setdefault(reason.split(", got ")[0], []).append(where)
    return places


def _grouped(places: list[str]) -> str:
    """["cpu fp32", "cpu bf16"] as "cpu fp32 bf16"."""
    devices: dict[str, list[str]] = {}
    for place in places:
        device, dtype = place.split()
        devices.setdefault(device, []).append(dtype)
    return ", ".join(f"{device} {' '.join(dtypes)}" for device, dtypes in devices.items())
