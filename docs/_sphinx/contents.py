"""The table of contents, from the lists of links that a reader sees.

A page of contents is plain Markdown: sections with lists of links. Each section becomes
a hidden toctree of the pages that its list items begin with, so a page is in the
sidebar because it is in the list, and a page in no list is a warning of Sphinx's.
``handbook_globs`` adds pages below another one by a pattern, where there are such.
"""

from __future__ import annotations

import posixpath
import re
from fnmatch import fnmatch
from typing import Any

from sphinx.application import Sphinx

PAGES_OF_CONTENTS = ("docs/README", "docs/reference/README")
_SECTION = re.compile(r"^## +(.+)$", re.MULTILINE)
_ITEM = re.compile(r"^- \[[^\]]+\]\(([^)#:]+)\.md\)", re.MULTILINE)


def sections(text: str) -> list[tuple[str, list[str]]]:
    """Title ("" before the first one) of each section, and the targets of its list."""
    titles = ["", *_SECTION.findall(text)]
    bodies = re.split(r"^## .*$", text, flags=re.MULTILINE)
    return [(title, _ITEM.findall(body)) for title, body in zip(titles, bodies, strict=True)]


def _toctree(title: str, entries: list[str]) -> str:
    caption = f":caption: {title}\n" if title else ""
    listed = "\n".join(f"/{entry}" for entry in entries)
    return f"\n```{{toctree}}\n:hidden:\n{caption}\n{listed}\n```\n"


def _add(app: Sphinx, docname: str, source: list[str]) -> None:
    if docname in PAGES_OF_CONTENTS:
        folder = posixpath.dirname(docname)
        for title, links in sections(source[0]):
            if links:
                entries = [posixpath.normpath(posixpath.join(folder, link)) for link in links]
                source[0] += _toctree(title, entries)
    pattern = app.config.handbook_globs.get(docname)
    found = sorted(name for name in app.env.found_docs if pattern and fnmatch(name, pattern))
    if found:
        source[0] += _toctree("", found)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_config_value("handbook_globs", {}, "env")
    app.connect("source-read", _add)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
