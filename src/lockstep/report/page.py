"""The page: data, style, scripts and the chart library in one HTML file that needs no network."""

from __future__ import annotations

import html
import json
import math
from importlib import resources
from typing import Any

# in the order in which they run
LIBRARIES = ("d3-7.9.2.min.js", "plot-0.6.17.min.js")
SCRIPTS = (
    "base.js",
    "climb.js",
    "phases.js",
    "roofline.js",
    "source.js",
    "strips.js",
    "memory.js",
    "tiles.js",
    "rungs.js",
    "claims.js",
    "peers.js",
    "start.js",
)


def page(data: dict[str, Any], title: str) -> str:
    """The HTML text of a report."""
    parts = {
        "title": html.escape(title),
        "style": _asset("style.css"),
        "libraries": "\n".join(_script(_asset(f"vendor/{name}")) for name in LIBRARIES),
        "data": _embedded(data),
        "scripts": "\n".join(_script(_asset(name)) for name in SCRIPTS),
    }
    text = _asset("page.html")
    for name, value in parts.items():
        text = text.replace(f"<!-- {name} -->", value, 1)
    return text


def _asset(name: str) -> str:
    return (resources.files("lockstep.report") / "assets" / name).read_text(encoding="utf-8")


def _script(text: str) -> str:
    return f"<script>\n{text}\n</script>"


def _embedded(data: dict[str, Any]) -> str:
    """JSON that may stand inside a script element, whatever strings it holds."""
    text = json.dumps(_plain(data), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _plain(value: Any) -> Any:
    """Infinities and NaN, which JSON does not have, as null."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
