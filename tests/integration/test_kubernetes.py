"""What the manifests of services/kubernetes say (config, environment, ports, probes,
process 1 and its signals), run as processes of hosts with a network between them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from replicas.cli.tokens import make
from tests.support.manifests import container, documents, environment, status_of
from tests.support.networks import Machine, hosts, why_no_hosts
from tests.support.runs import ROOT, alive, eventually

LABELS = "metadata.labels['leaderworkerset.sigs.k8s.io/{}-index']"

TRAINS = """
import sys, torch, replicas
with replicas.join("policy") as channel:
    print("joined", channel.member.name, flush=True)
    for line in sys.stdin:
        receipt = channel.publish({"w": torch.full((100_000,), float(line))}, deadline=60).wait()
        print(receipt.version, len(receipt.members), flush=True)
"""

SERVES = """
import replicas
with replicas.join("policy") as channel:
    print("joined", channel.member.name, flush=True)
    while True:
        with channel.receive().wait() as update:
            print(update.version, *{float(tensor.mean()) for _, tensor in update}, flush=True)
"""


@pytest.fixture(autouse=True, scope="module")
def _hosts() -> None:
    reason = why_no_hosts()
    if reason:
        pytest.skip(reason)


class Cluster:
    """A folder in place of the cluster's volumes, and one table of names for all
    pods."""

    def __init__(self, folder: Path, machines: tuple[Machine, ...]) -> None:
        self._names = folder / "hosts"
        self._places = {
            "/etc/replicas-token": folder / "token",
            "/etc/replicas": folder / "config",
            "/var/lib/replicas": folder / "state",
        }
        for place in self._places.values():
            place.mkdir()
        make(folder / "token")
        (config,) = [one for one in documents("supervisor.yaml") if one["kind"] == "ConfigMap"]
        for name, text in config["data"].items():
            (folder / "config" / name).write_text(self._placed(text))
        self.place_supervisor(machines[0])
        for machine in machines:
            subprocess.run(machine.command("mount", "--bind", str(self._names), "/etc/hosts"), check=True, timeout=20)

    def _placed(self, text: str) -> str:
        for path, place in self._places.items():
            text = text.replace(f"{path}/", f"{place}/")
        return text

    def place_supervisor(self, machine: Machine) -> None:
        """Say to all pods, which have this file open, where the supervisor's pod is."""
        self._names.write_text(f"127.0.0.1 localhost\n{machine.address} replicas-0 replicas\n")

    @contextlib.contextmanager
    def supervisor(self, machine: Machine) -> Iterator[Pod]:
        """The StatefulSet's pod; its program is process 1 of a namespace of its own."""
        command = container("supervisor.yaml")["command"]
        program = [str(Path(sys.executable).parent / command[0]), *map(self._placed, command[1:])]
        alone = ["unshare", "--pid", "--fork", "--kill-child=KILL", "--mount-proc"]
        with self._started(machine, [*alone, *program], {}) as pod:
            yield pod

    @contextlib.contextmanager
    def pod(self, machine: Machine, manifest: str, program: str, **fields: str) -> Iterator[Pod]:
        """A pod with the environment of the manifest, and another program."""
        given = environment(container(manifest), {LABELS.format(name): value for name, value in fields.items()})
        variables = {name: self._placed(value) for name, value in given.items()}
        with self._started(machine, [sys.executable, "-c", program], variables) as pod:
            yield pod

    @contextlib.contextmanager
    def _started(self, machine: Machine, command: list[str], variables: dict[str, str]) -> Iterator[Pod]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        with subprocess.Popen(
            machine.command(*command),
            env={**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield Pod(machine, process)
            finally:
                process.kill()


class Pod:
    def __init__(self, machine: Machine, process: subprocess.Popen[str]) -> None:
        self._machine = machine
        self._process = process

    def first(self) -> int:
        """The pid, as seen from here, of what is process 1 in the pod."""

        def find() -> int:
            with contextlib.suppress(ValueError, FileNotFoundError, ProcessLookupError):
                return Machine.pid_of(Machine.pid_of(self._process.pid))
            return 0

        return int(eventually(find, "process 1"))

    def says(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def told(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()
        return self.says()

    def wait(self, timeout_s: float) -> int:
        return self._process.wait(timeout_s)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def probe(self, one: dict[str, Any]) -> int:
        """The status that a probe gets, or 0."""
        ports = {port["name"]: port["containerPort"] for port in container("supervisor.yaml")["ports"]}
        return self.get(f":{ports[one['httpGet']['port']]}{one['httpGet']['path']}", one["httpGet"]["scheme"])

    def get(self, rest: str, scheme: str = "HTTPS") -> int:
        return status_of(f"{scheme.lower()}://{self._machine.address}{rest}")


def test_pods_of_others_join_outlive_a_supervisor_and_end_in_order(tmp_path: Path) -> None:
    with hosts(5) as net, contextlib.ExitStack() as stack:
        before, after, *others = net.machines
        cluster = Cluster(tmp_path, net.machines)
        probes = container("supervisor.yaml")
        with cluster.supervisor(before) as supervisor:
            eventually(lambda: supervisor.probe(probes["startupProbe"]) == 200, "the startup probe", timeout_s=60)
            assert supervisor.probe(probes["readinessProbe"]) == 200, "members must find it before they are ready"
            assert supervisor.get(":9477/readyz") == 503
            trainer = stack.enter_context(cluster.pod(others[0], "trainer-jobset.yaml", TRAINS))
            lws = "rollout-leaderworkerset.yaml"
            first = stack.enter_context(cluster.pod(others[1], lws, SERVES, group="0", worker="0"))
            second = stack.enter_context(cluster.pod(others[2], lws, SERVES, group="0", worker="1"))
            assert trainer.says() == "joined trainer/0/0"
            assert {first.says(), second.says()} == {"joined rollout/0/0", "joined rollout/0/1"}
            assert trainer.told("1.5") == "1 2"
            assert (first.says(), second.says()) == ("1 1.5", "1 1.5")
            eventually(lambda: supervisor.get(":9477/readyz") == 200, "min_ready replicas")
            (monitor,) = documents("podmonitor.yaml")
            scraped = monitor["spec"]["podMetricsEndpoints"][0]
            assert supervisor.get(f":9477{scraped['path']}", scraped["scheme"]) == 200
            os.kill(supervisor.first(), signal.SIGKILL)  # a process that this test has started
            assert supervisor.wait(10) != 0
        # The StatefulSet starts its pod on another node, at another address.
        cluster.place_supervisor(after)
        with cluster.supervisor(after) as supervisor:
            eventually(lambda: supervisor.probe(probes["startupProbe"]) == 200, "the startup probe", timeout_s=60)
            assert trainer.told("2.5") == "2 2"
            assert (first.says(), second.says()) == ("2 2.5", "2 2.5")
            eventually(lambda: supervisor.get(":9477/readyz") == 200, "min_ready replicas")
            one = supervisor.first()
            os.kill(one, signal.SIGTERM)
            assert supervisor.wait(60) == 0, "within terminationGracePeriodSeconds"
            assert not alive(one)
            assert all(pod.is_running for pod in (trainer, first, second)), "they are not the supervisor's to end"
