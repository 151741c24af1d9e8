"""Lines of C++ with their indentation, the Python line each stands for, and its comments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from lockstep.simt import ir

INDENT = "  "
WIDTH = 100  # columns a line may have
COMMENT_GAP = "  // "
CONTINUED = "    "
FOR_TOOLS = ("noqa", "type:", "fmt:", "ruff:", "pragma:")  # comments for tools, not for readers
BREAK_BEHIND = (", ", " && ", " || ", " ? ", " = ", " += ", " + ", " * ", "; ")


class Writer:
    """Collects lines. Comments come from the sources of the kernel and its device functions."""

    def __init__(self, sources: list[ir.Source]):
        self.lines: list[str] = []
        self.locations: list[ir.Location | None] = []
        self.depth = 0
        self.sources = {(s.file, s.first_line): s for s in sources}
        self.commented: set[tuple[str, int]] = set()  # comments written above some line already

    def put(self, text: str, loc: ir.Location | None = None, comment: str | None = None) -> None:
        """One line with its trailing comment; a blank line for empty text.

        A comment that does not fit goes above, a statement that does not fit is broken.
        """
        indent = INDENT * self.depth
        if comment and len(indent + text + COMMENT_GAP + comment) <= WIDTH:
            text += COMMENT_GAP + comment
        elif comment:
            self.put(f"// {comment}", loc)
        while len(indent + text) > WIDTH and not text.startswith("//"):
            room = WIDTH - len(indent)
            found = [(text.rfind(mark, 0, room), mark) for mark in BREAK_BEHIND]
            at = max((place + len(mark) for place, mark in found if place > 0), default=0)
            if not at:
                break
            self._line(indent + text[:at].rstrip(), loc)
            indent = INDENT * self.depth + CONTINUED
            text = text[at:]
        self._line(indent + text if text else "", loc)

    def _line(self, text: str, loc: ir.Location | None) -> None:
        self.lines.append(text)
        self.locations.append(loc)

    @contextmanager
    def indented(self) -> Iterator[None]:
        self.depth += 1
        yield
        self.depth -= 1

    def gap(self) -> None:
        """A blank line, unless a block has just been opened or there is one."""
        if self.lines and self.lines[-1] and not self.lines[-1].endswith("{"):
            self.put("")

    def above(self, loc: ir.Location) -> None:
        """The lines of the source right above a statement: a blank line, comments."""
        source = self._source(loc)
        if source is None:
            return
        line = loc.line - 1
        comments = []
        while line > source.first_line and self._stands_alone(source, line):
            comment = source.comments.get(line)
            if comment is not None and (loc.file, line) not in self.commented:
                comments.append(comment[1])
                self.commented.add((loc.file, line))
            line -= 1
        if not source.lines[loc.line - 1 - source.first_line].strip() or (
            comments and not source.lines[line + 1 - source.first_line].strip()
        ):
            self.gap()
        for text in reversed(comments):
            self.put(f"// {text}")

    def _stands_alone(self, source: ir.Source, line: int) -> bool:
        text = source.lines[line - source.first_line].strip()
        return not text or text.startswith("#")

    def beside(self, loc: ir.Location, last: int | None = None) -> str | None:
        """The comment after a statement, or after the header of a compound one."""
        source = self._source(loc)
        if source is None:
            return None
        found = []
        for line in range(loc.line, (last or loc.end_line) + 1):
            comment = source.comments.get(line)
            if comment is not None and not self._stands_alone(source, line):
                if (loc.file, line) in self.commented:
                    continue
                self.commented.add((loc.file, line))
                if not comment[1].startswith(FOR_TOOLS):
                    found.append(comment[1])
        return "; ".join(found) or None

    def _source(self, loc: ir.Location) -> ir.Source | None:
        for source in self.sources.values():
            inside = 0 <= loc.line - source.first_line < len(source.lines)
            if source.file == loc.file and inside:
                return source
        return None
