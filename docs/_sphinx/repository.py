"""Links to files and folders of the repository that are no pages.

A link to a folder with a README leads to that page. A link to any other folder or file
leads to a page of this folder, made here, with the text of its files: so examples can
be read in the handbook, and no link leaves it.
"""

from __future__ import annotations

import html
import os
import posixpath
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform

PREFIX = "files/"
SHOWN = {".c", ".conf", ".json", ".md", ".py", ".service", ".sh", ".toml", ".yaml", ".yml"}
_LARGEST_NBYTES = 100_000


class RepositoryLinks(SphinxTransform):
    default_priority = 400

    def apply(self, **_: Any) -> None:
        for node in list(self.document.findall(addnodes.download_reference)):
            self._lead_to(node, node["reftarget"])
        for node in list(self.document.findall(addnodes.pending_xref)):
            if node.get("reftype") == "myst" and node.get("refdomain") is None:
                self._lead_to(node, node["reftarget"].partition("#")[0])
            elif node.get("refdomain") == "doc" and node["reftarget"] not in self.env.found_docs:
                self._lead_to(node, os.path.relpath(node["reftarget"] + ".md", posixpath.dirname(self.env.docname)))

    def _lead_to(self, node: nodes.Element, target: str) -> None:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(self.env.docname), target))
        path = Path(self.env.srcdir, place)
        if f"{place}/README" in self.env.found_docs:
            page, anchor = f"{place}/README", ""
        elif path.is_dir():
            page, anchor = PREFIX + place, ""
        elif path.is_file():
            page, anchor = PREFIX + posixpath.dirname(place), "#" + anchor_of(path.name)
        else:
            return  # MyST warns of it
        if page.startswith(PREFIX):
            self.env.metadata[self.env.docname].setdefault("folders", set()).add(page)
        uri = self.app.builder.get_relative_uri(self.env.docname, page) + anchor
        node.replace_self(nodes.reference("", "", *node.children, refuri=uri, internal=True))


def anchor_of(name: str) -> str:
    return name.replace(".", "-").replace("_", "-")


def _pages(app: Sphinx) -> Iterator[tuple[str, dict[str, Any], str]]:
    folders = {folder for found in app.env.metadata.values() for folder in found.get("folders", ())}
    for page in sorted(folders):
        place = page.removeprefix(PREFIX)
        body = [f"<h1>{html.escape(place)}</h1>"]
        for path in sorted(Path(app.srcdir, place).iterdir()):
            if path.is_file() and path.suffix in SHOWN and path.stat().st_size < _LARGEST_NBYTES:
                body.append(f'<section id="{anchor_of(path.name)}"><h2>{html.escape(path.name)}</h2>')
                body.append(_shown(path) + "</section>")
        yield page, {"title": place, "body": "\n".join(body)}, "page.html"


def _shown(path: Path) -> str:
    try:
        lexer = get_lexer_for_filename(path.name)
    except ClassNotFound:
        lexer = TextLexer()
    return highlight(path.read_text(), lexer, HtmlFormatter(cssclass="highlight"))


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_transform(RepositoryLinks)
    app.connect("html-collect-pages", _pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
