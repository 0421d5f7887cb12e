"""A real Prometheus beside a run under test, with the scrape config and rules that are
deployed: the rules alone are evaluated more often, and the targets are others."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any

import yaml

from replicas.linux.sockets import listeners
from tests.support.root import ROOT
from tests.support.waits import eventually

__all__ = ["PROMETHEUS", "Prometheus", "beside"]

SERVICE = ROOT / "services" / "supervisor"
PROMETHEUS = shutil.which(
    "prometheus", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
)
_TIMEOUT_S = 20.0


class Prometheus:
    """Its HTTP API at ``url``."""

    def __init__(self, url: str) -> None:
        self.url = url

    def ready(self) -> bool:
        """Whether it has read its disk and config."""
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=_TIMEOUT_S):
                return True
        except urllib.error.HTTPError as error:
            if error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                raise
            return False

    def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer. :raises ValueError: it is an error; its text."""
        query = urllib.parse.urlencode(parameters)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=_TIMEOUT_S) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(f"{parameters}: {error.read().decode()}") from error

    def ask(self, expr: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series of an expression now."""
        found = self.get("query", query=expr)["result"]
        return [(one["metric"], float(one["value"][1])) for one in found]

    def rules(self) -> dict[str, Any]:
        """The alert rules as it has read and evaluated them, by name."""
        return {rule["name"]: rule for group in self.get("rules")["groups"] for rule in group["rules"]}


def _config(targets: Mapping[str, str]) -> str:
    """The deployed config, for runs at other addresses."""
    config = yaml.safe_load((SERVICE / "prometheus.yml").read_text())
    config["global"]["evaluation_interval"] = "1s"
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [address], "labels": {"run": run}} for run, address in targets.items()]
    return yaml.safe_dump(config)


def _port(pid: int) -> int:
    """The port at which a process listens; 0: at none yet."""
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            held.add(str(entry.readlink()))
        except OSError:
            continue  # it was closed meanwhile
    return next((one.port for one, _ in listeners() if f"socket:[{one.inode}]" in held), 0)


@contextmanager
def beside(folder: Path, targets: Mapping[str, str]) -> Iterator[Prometheus]:
    """One that scrapes ``targets`` (addresses by names of runs) for this block."""
    assert PROMETHEUS is not None
    shutil.copy(SERVICE / "alerts.yml", folder)
    (folder / "prometheus.yml").write_text(_config(targets))
    command = [PROMETHEUS, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    command += ["--web.listen-address=127.0.0.1:0", "--log.level=warn"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    try:
        port = eventually(lambda: process.poll() is None and _port(process.pid), "Prometheus", timeout_s=30)
        prometheus = Prometheus(f"http://127.0.0.1:{port}")
        eventually(prometheus.ready, "Prometheus to be ready")
        eventually(lambda: len(prometheus.get("targets")["activeTargets"]) == len(targets), "its targets")
        yield prometheus
    finally:
        process.terminate()
        try:
            process.wait(20)
        finally:
            process.kill()
            process.wait(20)
