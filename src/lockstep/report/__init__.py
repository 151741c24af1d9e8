"""One HTML page that shows what the ladder's kernels do: `lockstep report`.

listing.py, kernel_view.py   one traced launch as data: source with heat, strips, maps
layouts.py, tile_steps.py    what a block holds, step by step
rung_views.py, measured.py   the rungs, and what results files say
collect.py                   all of it, in two processes
page.py, assets/             data, style, scripts and the chart library in one file
cli.py                       the command, and `lockstep trace --html`
"""

GPU = "H200"  # that plans, occupancy and roofs are for
