"""The picture in README: parts of a report, side by side.

python tests/report/gallery.py lockstep-report.html docs/gallery.png
"""

from __future__ import annotations

import sys
from pathlib import Path

from browser import Browser, missing

WIDTH = 1180
MOST = 300_000  # bytes
ARRANGE = """
const box = document.createElement('div');
const add = (title, ...elements) => {
  const heading = document.createElement('h3');
  heading.textContent = title;
  const part = document.createElement('div');
  part.append(heading, ...elements);
  box.append(part);
  return part;
};
const get = (selector) => document.querySelector(selector);
add('The climb', get('#climb .panels'));
add('Threads and warps of a block over time: ' + get('#rungs .name').textContent,
  get('.strips .legend'), get('.strip.lanes'), get('.strip.warps'));
add('What the block holds, after the first tile of keys', get('#tiles .tiles'));
box.style.cssText = 'padding: 4px 20px 16px; display: grid; gap: 4px';
document.body.replaceChildren(box);
document.querySelectorAll('.tiles figcaption br').forEach((br) => br.parentNode.lastChild.remove());
get('.tiles [data-array=out]').remove();
get('.lanes canvas').style.height = '130px';
redrawAll();
"""


def main(page: Path, out: Path) -> None:
    why_not = missing()
    if why_not:
        sys.exit(why_not)
    browser = Browser()
    try:
        browser.open(page, WIDTH)
        browser.run(ARRANGE)
        browser.wait("return document.querySelectorAll('svg').length >= 3")
        height = browser.run("return document.body.firstChild.getBoundingClientRect().height")
        picture = browser.picture(0, 0, WIDTH, height)
    finally:
        browser.quit()
    if len(picture) > MOST:
        sys.exit(f"the picture has {len(picture):,} bytes, it may have {MOST:,}")
    out.write_bytes(picture)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
