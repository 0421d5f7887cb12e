"""What the manifests of services/kubernetes say (config, environment, ports, probes,
process 1 and its signals), run as processes of hosts with a network between them. What
no process shows (schemas, labels, sizes, periods) is read in
tests/unit/house/test_kubernetes.py.

Covers: cli/token_command.py.
"""

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

from replicas.cli.token_command import make
from replicas.control.client import Client
from replicas.status import ReplicaStatus, RunStatus
from replicas.trust.tokens import OPERATOR_FILE
from tests.support.house.manifests import container, documents, environment, expanded, status_of
from tests.support.machine.networks import Machine, hosts, why_no_hosts
from tests.support.runs import ROOT, alive
from tests.support.waits import eventually

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

    def __init__(
        self, folder: Path, machines: tuple[Machine, ...], manifest: str = "supervisor.yaml", **other: str
    ) -> None:
        """``manifest``: that of the config; ``other``: what stands in it for another
        text."""
        self._names = folder / "hosts"
        self.programs = folder
        """In place of what images have: a folder of Python modules."""
        self._places = {
            "/etc/replicas-token": folder / "token",
            "/etc/replicas": folder / "config",
            "/var/lib/replicas": folder / "state",
        }
        for place in self._places.values():
            place.mkdir()
        make(folder / "token")
        self.operator_token = (folder / "token" / OPERATOR_FILE).read_text()  # as a Secret of it has it
        (config,) = [one for one in documents(manifest) if one["kind"] == "ConfigMap"]
        for name, text in config["data"].items():
            for old, new in other.items():
                text = text.replace(old, new)
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
    def agent(self, machine: Machine, name: str, gpus: str) -> Iterator[Pod]:
        """A pod of the agents' StatefulSet: its name is the host's."""
        one = container("agents.yaml")
        fields = {"status.podIP": machine.address, "replicas-token/operator-token": self.operator_token}
        variables = environment(one, fields) | {"CUDA_VISIBLE_DEVICES": gpus}
        words = [self._placed(expanded(word, variables)) for word in [*one["command"][1:], *one["args"]]]
        words[words.index("--state-dir") + 1] += f"-{name}"  # each pod has a volume of its own
        named = ["unshare", "--uts", "sh", "-c", f'hostname {name}; exec "$@"', "sh"]
        program = str(Path(sys.executable).parent / one["command"][0])
        with self._started(machine, [*named, program, *words], variables) as pod:
            yield pod

    @contextlib.contextmanager
    def _started(self, machine: Machine, command: list[str], variables: dict[str, str]) -> Iterator[Pod]:
        kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
        with subprocess.Popen(
            machine.command(*command),
            env={**kept, "PYTHONPATH": f"{ROOT}:{self.programs}", "OMP_NUM_THREADS": "1", **variables},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield Pod(machine, process, self.operator_token.strip())
            finally:
                process.kill()


class Pod:
    def __init__(self, machine: Machine, process: subprocess.Popen[str], token: str) -> None:
        self._machine = machine
        self._token = token
        self._process = process

    def first(self) -> int:
        """The pid, as seen from here, of what is process 1 in the pod."""

        def find() -> int:
            with contextlib.suppress(ValueError, FileNotFoundError, ProcessLookupError):
                return Machine.pid_of(Machine.pid_of(self._process.pid))
            return 0

        return int(eventually(find, "process 1"))

    def process(self) -> int:
        """The pid, as seen from here, of a program that has the pids of its machine."""
        return int(eventually(lambda: Machine.pid_of(self._process.pid), "its process"))

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

    def status(self) -> RunStatus:
        return Client(f"{self._machine.address}:9477", token=self._token).status()

    def replicas(self) -> dict[str, ReplicaStatus]:
        return {one.name: one for group in self.status().groups for one in group.replicas}

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


AGENT_TRAINS = """
import time, torch, replicas
step = 0
with replicas.join("policy") as channel:
    while True:
        step += 1
        channel.publish({"w": torch.full((1000,), float(step))}, deadline=100).wait()
        time.sleep(0.2)
"""

AGENT_SERVES = """
import replicas
with replicas.join("policy") as channel:
    while True:
        with channel.receive().wait():
            pass
"""


@pytest.mark.timeout(300)
def test_pods_are_nodes_whose_replicas_outlive_the_supervisors_pod(tmp_path: Path) -> None:
    (tmp_path / "programs").mkdir()
    for name, text in (("trainer", AGENT_TRAINS), ("rollout", AGENT_SERVES)):
        (tmp_path / "programs" / f"{name}.py").write_text(text)
    small = {"min_ready = 1": "min_ready = 2"}
    small |= {"nproc_per_node = 8": "nproc_per_node = 1", "nnodes = 2": "nnodes = 1", "replicas = 4": "replicas = 2"}
    with hosts(5) as net, contextlib.ExitStack() as stack:
        before, after, spare, *nodes = net.machines
        cluster = Cluster(tmp_path, net.machines, "agents.yaml", **small)
        cluster.programs = tmp_path / "programs"
        with cluster.supervisor(before) as supervisor:
            eventually(lambda: supervisor.get(":9477/livez") == 200, "the startup probe", timeout_s=60)
            agents = [stack.enter_context(cluster.agent(node, f"agent-{i}", "0,1")) for i, node in enumerate(nodes)]
            eventually(lambda: supervisor.get(":9477/readyz") == 200, "all replicas are ready", timeout_s=90)
            first, replicas = supervisor.status(), supervisor.replicas()
            assert {one.nodes for name, one in replicas.items() if "rollout" in name} == {("agent-0",), ("agent-1",)}
            assert {(one.state, one.generation) for one in replicas.values()} == {("ready", 1)}
            os.kill(supervisor.first(), signal.SIGKILL)  # a process that this test has started
            assert supervisor.wait(10) != 0
        # The next pod is elsewhere, at another address: within adopt, it takes over.
        cluster.place_supervisor(after)
        with cluster.supervisor(after) as supervisor:
            eventually(lambda: supervisor.get(":9477/readyz") == 200, "the replicas are taken over", timeout_s=90)
            eventually(lambda: all(one.pid for one in supervisor.replicas().values()), "the agents are back")
            taken = supervisor.replicas()
            assert {name: (one.pid, one.generation) for name, one in taken.items()} == {
                name: (one.pid, one.generation) for name, one in replicas.items()
            }
            version = first.channels[0].committed_version
            eventually(lambda: supervisor.status().channels[0].committed_version > version + 2, "commits", timeout_s=60)
            agents.append(stack.enter_context(cluster.agent(spare, "agent-2", "0,1")))
            eventually(lambda: [node.state for node in supervisor.status().nodes] == ["up"] * 3, "one more node")
            # Its pod is deleted: SIGTERM, and terminationGracePeriodSeconds.
            leaves = next(index for index, _ in enumerate(nodes) if taken["trainer/0"].nodes != (f"agent-{index}",))
            os.kill(agents[leaves].process(), signal.SIGTERM)
            assert agents[leaves].wait(90) == 0
            eventually(
                lambda: (
                    {one.nodes for one in supervisor.replicas().values()} == {(f"agent-{1 - leaves}",), ("agent-2",)}
                ),
                "the rollout has moved",
                timeout_s=60,
            )
            os.kill(supervisor.first(), signal.SIGTERM)
            assert supervisor.wait(60) == 0
            assert [agents[index].wait(30) for index in (1 - leaves, 2)] == [0, 0], "the run is over"
