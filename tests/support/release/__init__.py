"""A release as a user gets it: ``make dist``.

1. The sdist is packed, and the wheel built **from it**: so an installed sdist builds.
2. Both are looked into: no tests, all that a build needs, absolute links; ``twine
   check`` and ``auditwheel`` have their say. The wheel brings the compiled helper, for
   every Linux from glibc 2.17 on.
3. The wheel is installed into an empty environment, with what it requires but torch.
   There ``import replicas`` takes at most 50 ms (nothing that it imports needs torch),
   the helper is loaded, and ``replicas --help`` and ``report --demo`` work.
4. With torch beside it a user's program is checked by ``mypy --strict``, and run.

The tools are in ``.venv/dist``, the empty environment in ``.venv/user``; torch and mypy
are those of ``.venv``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from email import message_from_string

__all__ = ["SERVICE_FILES", "relative_links", "requirements", "wrong_in_sdist"]

SERVICE_FILES = (
    "agent/replicas-agent@.service",
    "grafana/boards/replicas.json",
    "grafana/compose.yaml",
    "kubernetes/supervisor.yaml",
    "supervisor/alerts.yml",
    "supervisor/prometheus.yml",
    "supervisor/replicas@.service",
)
"""What the documentation names, and each installation has (``replicas --services``)."""

_NEEDED = ("README.md", "LICENSE", "hatch_build.py", "replicas/weights/copies/streaming.c")


def wrong_in_sdist(names: Iterable[str]) -> list[str]:
    """What is wrong with the files of an sdist, whose names begin below its folder."""
    found = sorted(names)
    wrong = [f"{name} is missing" for name in _NEEDED if name not in found]
    return wrong + [f"{name} is of the tests" for name in found if re.search(r"(^|/)(tests/|test_\w+\.py$)", name)]


def requirements(metadata: str) -> list[str]:
    """What a distribution requires without any extra, from its metadata."""
    listed: list[str] = message_from_string(metadata).get_all("Requires-Dist", [])
    return sorted(one for one in listed if "extra ==" not in one)


def relative_links(metadata: str) -> list[str]:
    """Links of the page on the package index that lead nowhere there."""
    return re.findall(r"\]\((?!https?:|#)[^)]*\)", metadata)
