"""Sphinx builds the handbook from this: ``make docs``.

The source folder is the repository, so that links among the Markdown files of all
folders lead to pages, here as on a code host. The pages are plain Markdown; what Sphinx
needs beside it is in the extensions of ``docs/_sphinx``.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "docs" / "_sphinx"))

project = "replicas"
author = "the authors of replicas"
version = release = re.findall(r'__version__ = "([^"]+)"', (ROOT / "replicas" / "__init__.py").read_text())[0]

extensions = ["myst_parser", "sphinx_copybutton", "contents", "diagrams", "names", "repository"]
root_doc = "docs/README"
source_suffix = {".md": "markdown"}
include_patterns = [
    *("docs/**", "examples/README.md", "services/README.md", "services/*/README.md"),
    *("ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md"),
]
exclude_patterns = ["docs/_build", "docs/_sphinx"]

myst_heading_anchors = 4
suppress_warnings = ["myst.header"]  # a page of the reference may go from its title to its third level

handbook_globs = {"docs/howto/alert": "docs/alerts/*"}

html_theme = "furo"
html_title = f"replicas {release}"
html_copy_source = False
html_show_sphinx = False
html_use_index = False
html_show_copyright = False
html_static_path = ["_sphinx/static"]
html_css_files = ["handbook.css"]
html_extra_path = ["_sphinx/root"]
html_search_scorer = str(ROOT / "docs" / "_sphinx" / "scorer.js")
pygments_style = "friendly"

copybutton_selector = "div.highlight pre"  # also on the pages of files, which are not of a document
copybutton_prompt_text = "$ "  # of a console block only what is typed is copied
