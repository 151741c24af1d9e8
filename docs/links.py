"""A hook of mkdocs for links to files above docs/, such as the README.

Pages are read in the repository as well, where `../README.md` is the way to say it. On the site
such a link goes to the repository, whose address LOCKSTEP_REPOSITORY holds; without it the words
stay and the link goes. A file that is not there is an error in either case.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
ABOVE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#]+)(#[^)]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    repository = os.environ.get("LOCKSTEP_REPOSITORY")

    def link(found: re.Match[str]) -> str:
        words, path, anchor = found[1], found[2], found[3] or ""
        if not (ROOT / path).exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {path}, which is not there")
        return f"[{words}]({repository}/blob/main/{path}{anchor})" if repository else words

    return ABOVE.sub(link, markdown)
