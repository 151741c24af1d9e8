"""Imports go down the map in CONTRIBUTING.md, and never in a circle.

Every import counts, also one inside a function or for types alone.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "lockstep"


def read_map() -> dict[str, int]:
    """Files and folders of the map in CONTRIBUTING.md, each with the number of its line.

    A line names one or more (`dispatch.py`, `kernels/cpu/`), which do not import each other.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```\nsrc/lockstep/\n((?:  .*\n)+)", text)
    lines = [re.split(r"  +", line.strip())[0] for line in block.splitlines()]
    return {place: floor for floor, line in enumerate(lines) for place in line.split(", ")}


def modules() -> dict[str, str]:
    """Paths below src/lockstep by the names of their modules."""
    found = {}
    for path in SOURCE.rglob("*.py"):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name] = path.relative_to(SOURCE).as_posix()
    return found


@cache
def graph() -> dict[str, set[str]]:
    """What each file imports from this package, by their paths."""
    known = modules()
    return {path: imports(path, known) for path in known.values()}


def imports(path: str, known: dict[str, str]) -> set[str]:
    """Paths of what a file imports from this package."""
    package = ("lockstep", *Path(path).parent.parts)
    found = set()
    for node in ast.walk(ast.parse((SOURCE / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) + 1 - node.level] if node.level else ()
            base = ".".join((*above, *([node.module] if node.module else [])))
            inside = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name if name in known else base for name in inside}
    return {known[name] for name in found if name in known} - {path}


def place_of(path: str, places: dict[str, int]) -> str | None:
    """The entry of the map that a file belongs to: itself, or the innermost folder."""
    folders = [f"{folder.as_posix()}/" for folder in Path(path).parents]
    return next((place for place in (path, *folders) if place in places), None)


def test_the_map_names_what_there_is():
    places = read_map()
    assert [place for place in places if not (SOURCE / place).exists()] == []
    paths = modules().values()
    missing = sorted(path for path in paths if place_of(path, places) is None)
    assert missing == [], "add them to the map in CONTRIBUTING.md"


def test_imports_go_down_the_map():
    places = read_map()
    upward = []
    for path, imported_ones in graph().items():
        here = place_of(path, places)
        for imported in imported_ones:
            there = place_of(imported, places)
            if here and there and here != there and places[there] <= places[here]:
                upward.append(f"{path} imports {imported}, which is no line below it")
    assert sorted(upward) == []


def test_no_circle():
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        raise AssertionError(" imported by ".join(error.args[1])) from None


def test_an_import_inside_a_function_and_a_relative_one_count():
    assert "kernels/cpu/__init__.py" in graph()["dispatch.py"]
    assert "ladder/rung.py" in graph()["ladder/cli.py"]
    assert "commands/doctor.py" in graph()["cli.py"]


@pytest.mark.parametrize(
    "package", sorted(path.parent for path in SOURCE.rglob("__init__.py")), ids=lambda x: x.name
)
def test_a_package_that_lists_its_files_lists_all(package):
    """Docstrings of packages that list files, one or more to a line."""
    code = (package / "__init__.py").read_text(encoding="utf-8")
    listing = ast.get_docstring(ast.parse(code)) or ""
    named = set(re.findall(r"\b\w+\.py\b", listing))
    if len(re.findall(r"^ *\w+\.py\b", listing, re.MULTILINE)) > 1:
        assert named <= {path.name for path in package.parent.rglob("*.py")}
        assert {path.name for path in package.glob("*.py")} - {"__init__.py"} <= named
