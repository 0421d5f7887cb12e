"""The files of the page: its HTML, style sheet, icon and one script.

There is no build step: the script is the modules of ``static/``, concatenated in the
order of their imports, without ``import`` and ``export``. So the browser makes one
request, a report is one file, and both run the same text. A test checks that top-level
names of the modules differ.

The Content-Security-Policy allows no script or style inside the HTML and no other
origin, and text cannot become markup (Trusted Types). A report lists the hashes of its
own script and style.
"""

from __future__ import annotations

import base64
import functools
import gzip
import hashlib
import re
from pathlib import Path

import msgspec

from replicas.page.document import Tree

STATIC = Path(__file__).parent / "static"
MODULES = (
    "elements",
    "texts",
    "model",
    "places",
    "syncs",
    "served",
    "lanes",
    "tables",
    "orders",
    "panel",
    "link",
    "main",
)
"""Modules of the script, in the order of their imports."""
_NOTHING_ELSE = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
POLICY = (
    f"{_NOTHING_ELSE}; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class)\b)", re.MULTILINE)


class Asset(msgspec.Struct, frozen=True):
    """One file of the page as it is sent. ``packed``: its body compressed by gzip.

    ``kind``: its Content-Type; ``tag``: its ETag.
    """

    kind: str
    body: bytes
    packed: bytes
    tag: str


@functools.cache
def asset(name: str) -> Asset | None:
    """Return ``index.html``, ``page.js``, ``page.css`` or ``icon.svg`` as it is sent;
    None for any other name. Each is read and compressed once."""
    kinds = {
        "index.html": "text/html",
        "page.js": "text/javascript",
        "page.css": "text/css",
        "icon.svg": "image/svg+xml",
    }
    if name not in kinds:
        return None
    body = script().encode() if name == "page.js" else (STATIC / name).read_bytes()
    tag = f'"{hashlib.sha256(body).hexdigest()[:16]}"'
    kind = kinds[name] if name == "icon.svg" else f"{kinds[name]}; charset=utf-8"
    return Asset(kind, body, gzip.compress(body, 9, mtime=0), tag)


@functools.cache
def script() -> str:
    """Return the page's JavaScript modules as the text of one script.

    They are read at the first call.
    """
    texts = ((STATIC / f"{name}.js").read_text() for name in MODULES)
    return "\n".join(_EXPORT.sub("", _IMPORT.sub("", text)) for text in texts)


def in_one_file(document: Tree) -> str:
    """Return the page as the text of one HTML file: markup, script, style, and this
    document (the data that the script shows) as JSON. Write nothing."""
    style = (STATIC / "page.css").read_text()
    policy = f"{_NOTHING_ELSE}; script-src {_hash(script())}; style-src {_hash(style)}"
    data = msgspec.json.encode(document).decode().replace("<", "\\u003c")
    text = (STATIC / "index.html").read_text()
    for old, new in (
        (
            '<meta charset="utf-8">',
            f'<meta charset="utf-8">\n<meta http-equiv="Content-Security-Policy" content="{policy}">',
        ),
        ('<link rel="icon" href="page/icon.svg">\n', ""),
        ('<link rel="stylesheet" href="page/page.css">', f"<style>{style}</style>"),
        (
            '<script type="module" src="page/page.js"></script>',
            f'<script type="application/json" id="document">{data}</script>\n<script type="module">{script()}</script>',
        ),
    ):
        before, found, after = text.partition(old)
        if not found:
            raise ValueError(f"{old} is missing in index.html")
        text = before + new + after
    return text


def _hash(text: str) -> str:
    """Return the SHA-256 of a text as a Content-Security-Policy has it:
    ``'sha256-...'``."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
