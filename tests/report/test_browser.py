"""The page in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.report import cli

SECTIONS = ["climb", "phases", "roofline", "rungs", "tiles", "claims", "peers", "audits"]
PRESENT = "return [...document.querySelectorAll('main > section')].map(s => s.id)"
TOO_WIDE = """
const inside = (e) => e.closest('.wide') && e !== e.closest('.wide');
return [...document.querySelectorAll('body *')]
  .filter((e) => !inside(e) && e.getBoundingClientRect().right > innerWidth + 1)
  .map((e) => e.outerHTML.slice(0, 80));
"""


@pytest.mark.parametrize("dark", [False, True])
def test_loads_without_a_word_on_the_console(browser, report, dark):
    browser.messages()
    browser.open(report, dark=dark)
    assert browser.messages() == []
    assert browser.run(
        "return [...document.querySelectorAll('main > section')].map(s => s.id)"
    ) == (SECTIONS)
    empty = "return [...document.querySelectorAll('section')].filter(s => s.innerText.length < 80)"
    assert browser.run(empty + ".map(s => s.id)") == []
    paper = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, paper[4:-1].split(","))) < 200) == dark


@pytest.mark.parametrize("width", [375, 1280, 1920])
def test_nothing_is_wider_than_the_window(browser, report, width):
    browser.open(report, width)
    assert browser.run(TOO_WIDE) == []
    assert browser.run("return document.documentElement.scrollWidth") <= width


def test_every_chart_is_drawn_and_has_a_name(browser, report):
    browser.open(report)
    charts = browser.run(
        "return [...document.querySelectorAll('figure svg, figure canvas')].filter("
        "e => !e.closest('[class*=swatch]')).map(e => [e.clientWidth,"
        " e.getAttribute('aria-label') ?? e.closest('[aria-label]')?.getAttribute('aria-label')])"
    )
    assert len(charts) > 15
    assert all(width > 0 for width, _ in charts)
    assert all(name for _, name in charts)


def test_claims_are_filtered(browser, report, data):
    browser.open(report)
    rows = "return document.querySelectorAll('#claims tbody tr').length"
    assert browser.run(rows) == len(data["claims"])
    verdict = data["claims"][0]["verdict"]
    wanted = sum(claim["verdict"] == verdict for claim in data["claims"])
    button = f"document.querySelector('#claims [data-verdict=\"{verdict}\"]')"
    browser.run(f"{button}.click()")
    assert browser.run(rows) == wanted
    assert browser.run(f"return {button}.getAttribute('aria-pressed')") == "true"
    browser.run(
        "const s = document.querySelector('#claims input'); s.value = 'no claim says this';"
        "s.dispatchEvent(new Event('input'))"
    )
    assert browser.run(rows) == 0
    text = browser.run("return document.getElementById('claims-count').textContent")
    assert text == f"0 of {len(data['claims'])} claims"


def test_the_climb_is_of_one_problem(browser, report, data):
    """Rows of the table do not mix sizes: counts and times are of the problem that it names."""
    browser.open(report)
    problem = data["counts"]["problem"]
    summary = browser.run("return document.querySelector('#climb summary').textContent")
    assert summary.endswith(problem)
    cells = "return [...document.querySelectorAll('#climb tbody tr')].map((r) => r.innerText)"
    (row,) = (row for row in browser.run(cells) if row.startswith("small_tile_2d"))
    (times,) = (entry["times"] for entry in data["times"] if entry["shape"] == problem)
    assert f"{times['small_tile_2d']:.0f} µs" in row
    before = browser.run(cells)
    browser.run(
        "const s = document.querySelector('#climb select'); s.selectedIndex = 2;"
        "s.dispatchEvent(new Event('change'))"
    )
    assert browser.run(cells) == before


def test_time_by_phase_of_another_problem(browser, report, data):
    browser.open(report)
    bars = "return document.querySelectorAll('#phases svg rect').length"
    first, last = data["phase_times"][0], data["phase_times"][-1]
    assert browser.run(bars) == sum(s > 0 for r in first["rows"] for s in r["shares"].values())
    number = len(data["phase_times"]) - 1
    browser.run(
        f"const s = document.querySelector('#phases select'); s.value = {number};"
        "s.dispatchEvent(new Event('change'))"
    )
    expected = sum(s > 0 for r in last["rows"] for s in r["shares"].values())
    browser.wait(f"{bars} === {expected}")  # a busy browser draws later
    text = browser.run("return document.querySelector('#phases svg').textContent")
    assert last["rows"][-1]["title"] in text


def test_steps_by_button_and_by_key(browser, report):
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    browser.open(report)
    where = "return document.querySelector('#tiles .status').textContent"
    pixels = "return document.querySelector('#tiles [data-array=acc] canvas').toDataURL()"
    view = browser.driver.find_element(By.CSS_SELECTOR, "#tiles .tile-steps")
    view.send_keys(Keys.HOME)
    assert "step 1 of" in browser.run(where)
    before = browser.run(pixels)
    for _ in range(4):
        browser.run("document.querySelector('#tiles [aria-label=\"next step\"]').click()")
    assert "step 5 of" in browser.run(where)
    assert "changed: acc" in browser.run(where)
    assert browser.run(pixels) != before
    view.send_keys(Keys.ARROW_LEFT)
    assert "step 4 of" in browser.run(where)
    view.send_keys(Keys.PAGE_DOWN)
    assert "tile 2" in browser.run(where)


def test_another_rung_another_launch_another_heat(browser, report):
    browser.open(report)
    choose = "const s = document.getElementById('rung'); s.value = 1;"
    browser.run(choose + "s.dispatchEvent(new Event('change'))")
    assert browser.run("return document.querySelector('#rungs .name').textContent") == "naive"
    browser.run("document.querySelectorAll('#rungs [aria-label=launches] button')[2].click()")
    assert "naive_output" in browser.run("return document.querySelector('.heat').innerText")
    change = "const s = document.querySelector('.heat select'); s.value = 'sectors';"
    browser.run(change + "s.dispatchEvent(new Event('change'))")
    heads = "return [...document.querySelectorAll('.heat th')].map(t => t.textContent)"
    assert "sectors" in browser.run(heads)
    assert browser.messages() == []


def test_the_button_turns_the_page_dark(browser, report):
    browser.open(report)
    browser.run("document.getElementById('theme').click()")
    assert browser.run("return document.documentElement.dataset.theme") == "dark"
    assert browser.messages() == []


def test_prints_on_white_without_controls(browser, report):
    browser.open(report, 800, dark=True)
    browser.emulate(dark=True, medium="print")
    assert browser.run("return getComputedStyle(document.body).backgroundColor") == (
        "rgb(255, 255, 255)"
    )
    shown = "return [...document.querySelectorAll('.controls, #contents')].filter("
    assert browser.run(shown + "e => e.offsetParent).length") == 0
    browser.emulate()


def test_the_page_of_a_kernel(browser, tmp_path):
    from transposed import traced

    path = tmp_path / "kernel.html"
    cli.write_kernels(Path(path), [traced()], "transpose")
    browser.open(path)
    assert browser.messages() == []
    assert browser.run(
        "return [...document.querySelectorAll('main > section')].map(s => s.id)"
    ) == [
        "rungs",
        "tiles",
    ]
    assert "32 wavefronts where 1 would do" in browser.run("return document.body.innerText")
