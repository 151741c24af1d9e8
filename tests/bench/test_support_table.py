from __future__ import annotations

from pathlib import Path

from lockstep.bench import support_table


def test_cells_say_what_kernels_say():
    table = support_table.block(Path())
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    heads = [cell.strip() for cell in table.splitlines()[0].split("|")[2:-1]]
    assert heads == ["hopper", "triton", "cpu"]

    def cells(name: str) -> dict[str, str]:
        found = [cell.strip() for cell in rows[name].split("|")[2:-1]]
        return dict(zip(heads, found, strict=True))

    assert cells("`bfloat16`") == dict.fromkeys(heads, "forward, backward")
    assert cells("`bias`")["hopper"] == "–"
    assert cells("`attention_paged`") == {"hopper": "–", "triton": "forward", "cpu": "forward"}
    assert cells("`query_invariant`")["hopper"] == "–"
