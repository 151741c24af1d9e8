"""What the producer sends of a tile: queries, and blocks of keys and values."""

from __future__ import annotations

from lockstep.kernels.hopper.common.gluon_shim import gluon
from lockstep.kernels.hopper.common.pages import send_pages
from lockstep.kernels.hopper.forward.grouped_rows import send_rows


@gluon.jit
def send_queries(schedule, q_ring, i, q_desc, tile, row):
    """Producer: send a consumer its rows of a tile, from `row` on, as the i-th in all."""
    if schedule.HEADS:
        send_rows(schedule, q_ring, i, q_desc, tile, row)
    else:
        q_ring.send(i, q_desc, schedule.q_coordinates(tile, row))


@gluon.jit
def send_block(program, k_desc, v_desc, tile, block, i, first_column):
    """Producer: send the keys of a block, the i-th in all, and its values, of which columns begin
    with `first_column`. Only one of both, where the other's tensor map is None."""
    schedule = program.schedule
    if program.pages.ROWS:
        key = block * schedule.BLOCK_KV
        # Packed sequences have no batch, and where their keys would begin stands their number.
        sequence = tile.kv_start if schedule.LAYOUT == "varlen" else tile.batch
        places = program.pages.places_of(sequence, key, tile.len_kv, schedule.BLOCK_KV)
        if k_desc is not None:
            send_pages(program.k, i, k_desc, places, tile.kv_head, 0)
        if v_desc is not None:
            send_pages(program.v, i, v_desc, places, tile.kv_head, first_column)
    else:
        program.k.send(i, k_desc, schedule.kv_coordinates(tile, block))
        program.v.send(i, v_desc, schedule.kv_coordinates(tile, block, first_column))
