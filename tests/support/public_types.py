"""Types of the public names as another program's checker sees them: ``python -m
tests.support.public_types``.

mypy checks this project's own code, where a type may be inferred. A user's checker
reads the installed package, and checkers infer differently. So pyright verifies the
types of the package (``--verifytypes``), and this fails when a public name has a type
that is unknown, or an attribute without an annotation. Public are the names in
``replicas.__all__``, what their classes show, and ``replicas.errors``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import replicas

__all__ = ["main", "problems"]

_LIMIT_S = 300.0


def _public(name: str) -> bool:
    homes = [f"replicas.{one}" for one in ("errors", *replicas.__all__)]
    for one in replicas.__all__:
        found = getattr(replicas, one)
        if isinstance(found, type):
            homes.append(f"{found.__module__}.{found.__qualname__}")
    last = name.rpartition(".")[2]
    return any(name == home or name.startswith(f"{home}.") for home in homes) and not last.startswith("_")


def problems(symbols: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is wrong with the public ones of ``symbols``, which pyright reports; also
    that one of them is not there."""
    names = {str(symbol["name"]) for symbol in symbols}
    for name in set(replicas.__all__) - {"__version__", "errors"}:
        if f"replicas.{name}" not in names:
            yield f"replicas.{name}: pyright does not see it"
    for symbol in symbols:
        if not _public(symbol["name"]) or symbol["isTypeKnown"]:
            continue
        if not symbol["isTypeAmbiguous"]:
            yield f"{symbol['name']}: a part of its type is unknown"
        for diagnostic in symbol["diagnostics"]:
            if "missing type annotation" in diagnostic["message"]:
                yield f"{symbol['name']}: {' '.join(diagnostic['message'].split())}"


def main() -> int:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson"]
    command += ["--ignoreexternal", "--verifytypes", "replicas"]
    path = os.pathsep.join(filter(None, sys.path))  # an editable installation is not looked up by pyright
    environment = {**os.environ, "PYTHONPATH": path, "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    try:
        symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    except (ValueError, LookupError):
        print(f"pyright failed with {done.returncode}:\n{done.stdout}{done.stderr}", file=sys.stderr)
        return 1
    found = sorted(problems(symbols))
    public = sum(_public(symbol["name"]) for symbol in symbols)
    print(*found, f"{public} public names, {len(found)} problems", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
