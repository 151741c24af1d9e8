"""`lockstep.audit.model` on small random models of transformers, by attention: docs/audit.md.

    PYTHONPATH=src python benchmarks/audit_models.py

Counts the circumstances in which a sequence has other bits, and names the first module that has
them. Writes benchmarks/results/audit-models-cpu.json.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import lockstep.audit
from lockstep.integrations import transformers as integration
from lockstep.output import results

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "integrations"))
import tiny_models  # noqa: E402

ATTENTIONS = ("eager", "sdpa", "lockstep")
MODELS = (*tiny_models.DECODERS, *tiny_models.ENCODERS, "t5", "whisper", "vit")
B, S = 8, 37


def verdict(name: str, attention: str) -> str:
    try:
        model = tiny_models.make(name, attention).eval()
    except ValueError:
        return "not in transformers"
    found = lockstep.audit.model(model, tiny_models.inputs_of(name, B=B, S=S))
    first = [x.module.name for x in found if x.module is not None]
    return f"{len(first)} of {len(found)}: {first[0]}" if first else f"0 of {len(found)}"


def main() -> None:
    integration.register()
    torch.manual_seed(0)
    rows = []
    for name in MODELS:
        for attention in ATTENTIONS:
            rows.append({"model": name, "attention": attention, "differ": verdict(name, attention)})
            print(rows[-1], flush=True)
    run = results.collect("audit-models-cpu", rows)
    run["tables"] = {
        "audit_models": {
            "on": "cpu",
            "by": ["model"],
            "columns": {attention: {"attention": attention} for attention in ATTENTIONS},
            "value": "differ",
            "format": "{}",
            "caption": f"fp32, random weights, {B} sequences of {S} tokens",
        }
    }
    results.write(run, ROOT / results.RESULTS / "audit-models-cpu.json")


if __name__ == "__main__":
    main()
