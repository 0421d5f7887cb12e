"""The processes of a supervised vLLM server, and the versions of its answers."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import threading
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field

import psutil

__all__ = ["ROLES", "Sampler", "end", "processes"]

ROLES = ("follower", "api", "core", "worker")
SAMPLE_S = 10.0
"""A worker of vLLM spins for a second after each request, on a core that the trainer
needs."""
ANSWER_S = 20.0


def processes(follower: int) -> dict[str, int]:
    """Return the pids of one server's processes by role, from its replica's program
    down; missing ones are left out."""
    found = {"follower": follower}
    with contextlib.suppress(psutil.Error):  # one of them has ended
        process = psutil.Process(follower)
        for role, word in zip(ROLES[1:], ("cli.main", "spawn_main", "spawn_main"), strict=True):
            below = (child for child in process.children() if word in " ".join(child.cmdline()))
            if (child := next(below, None)) is None:
                break
            process = child
            found[role] = child.pid
    return found


def end(pid: int, signum: int) -> None:
    """Send the signal to a process of vLLM, and to no other.

    :raises ProcessLookupError: the process has ended.
    """
    try:
        process = psutil.Process(pid)
        if "vllm" not in " ".join(process.cmdline()) and "spawn_main" not in " ".join(process.cmdline()):
            raise ProcessLookupError(pid)
        process.send_signal(signal.Signals(signum))
    except psutil.Error as error:
        raise ProcessLookupError(pid) from error


@dataclass
class Sampler:
    """Threads that request one token from each server, periodically, and count the
    versions of the weights with which the answers are tagged.

    :ivar urls: returns the servers' addresses by replica.
    :ivar answers: number of answers by replica and version, in the order of arrival.
    :ivar went_back: answers with an older version than an earlier one of the same
        replica.
    """

    urls: Callable[[], dict[str, str]]
    answers: dict[str, dict[int, int]] = field(default_factory=dict)
    went_back: list[str] = field(default_factory=list)
    refused: int = 0
    _over: threading.Event = field(default_factory=threading.Event)
    _threads: dict[str, threading.Thread] = field(default_factory=dict)

    def look(self) -> None:
        """Start a thread for each new server."""
        for replica in self.urls():
            if replica not in self._threads:
                self._threads[replica] = threading.Thread(target=self._ask_on, args=(replica,), daemon=True)
                self._threads[replica].start()

    def close(self) -> None:
        self._over.set()
        for thread in self._threads.values():
            thread.join(ANSWER_S + SAMPLE_S)

    def _ask_on(self, replica: str) -> None:
        while not self._over.wait(SAMPLE_S):
            url = self.urls().get(replica)
            try:
                version = _ask(url) if url else None
            except (OSError, http.client.HTTPException):  # refused, or cut off: it is being restarted
                version = None
            if version is None:
                self.refused += 1
                continue
            seen = self.answers.setdefault(replica, {})
            if seen and version < max(seen):
                self.went_back.append(f"{replica}: version {version} after {max(seen)}")
            seen[version] = seen.get(version, 0) + 1


def _ask(url: str) -> int:
    """Return the version with which one answer is tagged."""
    body = json.dumps({"token_ids": [504, 2], "sampling_params": {"max_tokens": 1}}).encode()
    request = urllib.request.Request(f"{url}/inference/v1/generate", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWER_S) as response:
        spans = json.loads(response.read())["choices"][0]["weight_versions"]
    return int(spans[-1]["version"])
