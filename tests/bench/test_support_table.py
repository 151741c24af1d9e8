from __future__ import annotations

from pathlib import Path

from lockstep.bench import support_table


def test_cells_say_what_kernels_say():
    table = support_table.block(Path())
    rows = {line.split("|")[1].strip(): line for line in table.splitlines()[2:]}
    heads = [cell.strip() for cell in table.splitlines()[0].split("|")[2:-1]]
    assert heads == ["hopper_decode", "hopper", "triton", "amx", "cpu"]

    def cells(name: str) -> dict[str, str]:
        found = [cell.strip() for cell in rows[name].split("|")[2:-1]]
        return dict(zip(heads, found, strict=True))

    both = dict.fromkeys(heads, "forward, backward")
    assert cells("`bfloat16`") == both | {"hopper_decode": "–"}
    assert cells("`bias`")["hopper"] == "–"
    assert cells("`float16`")["amx"] == cells("`constant_time`")["amx"] == "–"
    forward = dict.fromkeys(heads, "forward")
    assert cells("`attention_paged`, one query") == forward | {"hopper": "–"}
    assert cells("`attention_paged`, 512 queries") == forward | {"hopper_decode": "–"}
    assert cells("`query_invariant`")["hopper"] == "forward"
