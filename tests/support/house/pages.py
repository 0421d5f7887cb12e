"""What stands in the pages of the handbook: code blocks, and the files and commands of
a tutorial, which :class:`Terminal` plays as a reader would.

A file is a code block behind a line that ends with its name (```run.toml`:``). A
command is a line of a ``console`` block that begins with ``$ ``; what follows is a part
of its output, in which numbers may be others, and ``...`` stands for lines left out.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.root import ROOT

__all__ = ["Block", "Command", "Terminal", "blocks", "code", "commands", "files", "section"]

_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w+)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
_NAME = re.compile(r"`([\w.]+)`[^`\n]*:\s*\Z")
_NUMBER = re.compile(r"\d+")


class Block(NamedTuple):
    """A code block, with the file that the words before it name ("": none)."""

    language: str
    text: str
    name: str


class Command(NamedTuple):
    text: str
    shown: list[str]
    """Lines of its output that the page shows."""


def blocks(text: str) -> list[Block]:
    """The code blocks of a page, without the indent that they have in a list."""
    found = []
    for match in _FENCE.finditer(text):
        indent = match["indent"]
        body = "".join(line.removeprefix(indent) for line in match["text"].splitlines(keepends=True))
        name = _NAME.search(text[: match.start()])
        found.append(Block(match["language"], body, name[1] if name else ""))
    return found


def code(page: str) -> Any:
    """What the python of a how-to page defines."""
    found: dict[str, Any] = {}
    for block in blocks((ROOT / "docs" / "howto" / page).read_text()):
        if block.language == "python":
            exec(compile(block.text, page, "exec"), found)
    return types.SimpleNamespace(**found)


def section(text: str, title: str) -> str:
    """The part of a page below a heading of the second level."""
    _, found, rest = text.partition(f"\n## {title}\n")
    assert found, f"no section {title!r}"
    return rest.partition("\n## ")[0]


def files(text: str) -> dict[str, str]:
    return {block.name: block.text for block in blocks(text) if block.name}


def commands(text: str) -> list[Command]:
    found: list[Command] = []
    for block in blocks(text):
        for line in block.text.splitlines() if block.language == "console" else ():
            if line.startswith("$ "):
                found.append(Command(line.removeprefix("$ "), []))
            elif line != "...":
                found[-1].shown.append(line)
    return found


class Terminal:
    """A folder with two terminals: what begins with ``replicas run`` goes on in the
    first one, everything else is typed into the second."""

    def __init__(self, folder: Path, bin_folder: Path, **variables: str) -> None:
        self._folder = folder
        path = f"{bin_folder}{os.pathsep}{os.environ['PATH']}"
        self._environment = {**os.environ, "PATH": path, **variables}
        self.run: subprocess.Popen[str] | None = None
        self._shown = Command("", [])
        self._said = folder / "terminal"

    def type(self, command: Command, limit_s: float) -> str:
        """Run it to its end, and compare what it prints with what the page shows."""
        if command.text.startswith("replicas run "):
            self._shown = command
            with self._said.open("w") as file:
                self.run = self._start(command.text, stdout=file, stderr=subprocess.STDOUT)
            return ""
        with self._start(command.text, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        assert process.returncode == 0, f"{command.text}: {output}{self.said()}"
        _compare(command, output)
        return output

    def said(self) -> str:
        """What the first terminal shows."""
        return self._said.read_text() if self._said.exists() else ""

    def wait(self, limit_s: float) -> int:
        """For the end of the run, and compare what it has printed; its exit code."""
        assert self.run is not None
        code = self.run.wait(limit_s)
        _compare(self._shown, self.said())
        return code

    @contextlib.contextmanager
    def leaving(self) -> Iterator[Terminal]:
        """End the run with the block, whatever happens."""
        try:
            yield self
        finally:
            if self.run is not None and self.run.poll() is None:
                self.run.send_signal(signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self.run.wait(60)
                if self.run.poll() is None:
                    self.run.kill()
                    self.run.wait(10)

    def _start(self, text: str, **streams: object) -> subprocess.Popen[str]:
        arguments = ["bash", "-c", f"exec {text}" if text.startswith("replicas run ") else text]
        return subprocess.Popen(  # type: ignore[call-overload,no-any-return]  # streams are of two kinds
            arguments, cwd=self._folder, env=self._environment, text=True, **streams
        )


def _compare(command: Command, output: str) -> None:
    for line in command.shown:
        form = ".*".join(map(re.escape, _NUMBER.split(line)))
        assert re.search(form, output), f"{command.text} does not print {line!r}: {output}"
