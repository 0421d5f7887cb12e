"""Names of the reference that pages mention lead there.

The headings of docs/reference are the index. A literal in the text that is such a name
becomes a link to it: a public name, a command, a metric, an event, an error, a config
key, an environment variable. One that looks like such a name and is not in the
reference is a warning, so `make docs` fails on a page that mentions what is gone.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

LOGGER = logging.getLogger(__name__)
REFERENCE = "docs/reference/"
TELLS_OF_WHAT_WAS = {"CHANGELOG"}
_METRIC = re.compile(r"(replicas_[a-z_]+?)(_bucket|_sum|_count)?(\{.*)?")
_VARIABLE = re.compile(r"\$?(REPLICAS_[A-Z_]+)(=.*)?", re.DOTALL)
_COMMAND = re.compile(r"replicas ([a-z][a-z-]*)\b.*", re.DOTALL)
_PUBLIC = re.compile(r"replicas\.(?:errors\.|testing\.|engine\.)?([A-Z]\w*(?:\.\w+)?|join)(\(.*)?", re.DOTALL)


class Index:
    """Where each heading of the reference is: page and anchor by its text."""

    def __init__(self, env: BuildEnvironment) -> None:
        self._places: dict[str, tuple[str, str]] = {}
        for page in sorted(name for name in env.found_docs if name.startswith(REFERENCE)):
            for section in env.get_doctree(page).findall(nodes.section):
                title = section[0]
                for literal in title.findall(nodes.literal):
                    name = literal.astext().partition(":")[0].partition("(")[0]
                    self._places.setdefault(name, (page, section["ids"][0]))

    def find(self, text: str) -> tuple[str, str] | None:
        """The place of what ``text`` mentions; None where it is no name of the
        reference. LookupError: it looks like one."""
        if text in self._places:
            return self._places[text]
        for form, named in ((_METRIC, "{}"), (_VARIABLE, "{}"), (_COMMAND, "replicas {}"), (_PUBLIC, "{}")):
            if match := form.fullmatch(text):
                name = named.format(match[1])
                if name in self._places or name.endswith("_"):
                    return self._places.get(name)
                raise LookupError(f"the reference has no {name!r}")
        return None


def _index(app: Sphinx, env: BuildEnvironment) -> None:
    app.handbook_index = Index(env)  # type: ignore[attr-defined]  # lives for this build


def _link(app: Sphinx, doctree: nodes.document, docname: str) -> None:
    if docname.startswith(REFERENCE) or docname in TELLS_OF_WHAT_WAS:
        return
    for literal in list(doctree.findall(nodes.literal)):
        if any(isinstance(above, nodes.reference | nodes.title) for above in _above(literal)):
            continue
        try:
            place = app.handbook_index.find(" ".join(literal.astext().split()))  # type: ignore[attr-defined]
        except LookupError as error:
            LOGGER.warning("%s", error, location=literal, type="handbook", subtype="name")
            continue
        if place is not None:
            uri = f"{app.builder.get_relative_uri(docname, place[0])}#{place[1]}"
            literal.replace_self(nodes.reference("", "", literal.deepcopy(), refuri=uri, internal=True))


def _above(node: nodes.Node) -> list[nodes.Node]:
    found = []
    while node.parent is not None:
        node = node.parent
        found.append(node)
    return found


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("env-updated", _index)
    app.connect("doctree-resolved", _link)
    return {"parallel_read_safe": True, "parallel_write_safe": False}
