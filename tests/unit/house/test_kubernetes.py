"""The manifests of services/kubernetes fit Kubernetes' schemas, each other, and the
programs that they start: as text, where no network can be made. (That a run of them
works is in tests/integration/house/test_kubernetes.py, which reads no schema, and needs
root.)"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import kubernetes_validate
import msgspec
import pytest
from kubeflow_trainer_api.models.jobset_v1alpha2_job_set import JobsetV1alpha2JobSet

from replicas import environ
from replicas.cli import agent_command as cli_agent
from replicas.cli import main as cli
from replicas.config.file import parse
from replicas.config.structs import Config
from replicas.environ import JOIN
from replicas.integrations.gate import READYZ
from replicas.supervisor.agent.remote import Invitation
from tests.support.house.leader_worker_set import LeaderWorkerSet
from tests.support.house.manifests import FOLDER, container, documents, environment, expanded, pods

FILES = sorted(path.name for path in FOLDER.glob("*.yaml"))
ROLLOUTS = {"rollout-deployment.yaml": "Deployment", "rollout-leaderworkerset.yaml": "LeaderWorkerSet"}
RELEASE = "1.33"
FIELDS = {"status.podIP": "10.1.2.3"} | {
    f"metadata.labels['leaderworkerset.sigs.k8s.io/{name}-index']": "1" for name in ("group", "worker")
}
SECRETS = {"replicas-token/operator-token": "a secret of the cluster's\n"}


def read_jobset(written: dict[str, Any]) -> dict[str, Any]:
    read = JobsetV1alpha2JobSet.from_dict(written)
    assert read is not None
    return dict(read.to_dict())


def read_pod_monitor(written: dict[str, Any]) -> dict[str, Any]:
    from cloudcoil.models.prometheus_operator.v1 import PodMonitor  # takes seconds

    return dict(PodMonitor.model_validate(written).model_dump(by_alias=True, exclude_none=True, mode="json"))


def read_leader_worker_set(written: dict[str, Any]) -> dict[str, Any]:
    return dict(msgspec.to_builtins(msgspec.convert(written, LeaderWorkerSet)))


MODELS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "JobSet": read_jobset,
    "LeaderWorkerSet": read_leader_worker_set,
    "PodMonitor": read_pod_monitor,
}
"""What reads these as the models of their schemas, by kind."""


def config(name: str = "supervisor.yaml") -> Config:
    (found,) = [one["data"] for one in documents(name) if one["kind"] == "ConfigMap"]
    text = re.sub(r'"/etc/replicas-token/[^"]*"', f'"{__file__}"', found["run.toml"])
    return parse(tomllib.loads(text), base=Path("/"))


def every(kind: str) -> list[dict[str, Any]]:
    return [one for name in FILES for one in documents(name) if one["kind"] == kind]


def assert_kept(written: Any, read: Any) -> None:
    """A model has read all of it: it drops keys that it does not know."""
    if isinstance(written, dict):
        assert written.keys() <= read.keys()
        for key, value in written.items():
            assert_kept(value, read[key])
    elif isinstance(written, list):
        assert len(written) == len(read)
        for one, other in zip(written, read, strict=True):
            assert_kept(one, other)
    else:
        assert written == read


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_a_key_that_a_schema_has_not_is_found(kind: str) -> None:
    (one,) = every(kind)
    wrong = {**one, "spec": {**one["spec"], "replicatedjobs": []}}
    # msgspec's errors are no ValueErrors in the oldest release that may be here
    with pytest.raises((AssertionError, ValueError, msgspec.ValidationError)):
        assert_kept(wrong, MODELS[kind](wrong))


@pytest.mark.parametrize("name", FILES)
def test_every_object_fits_its_schema(name: str) -> None:
    for one in documents(name):
        if one["kind"] in MODELS:
            assert_kept(one, MODELS[one["kind"]](one))
        else:
            kubernetes_validate.validate(one, RELEASE, strict=True)
            continue
        for job in one["spec"].get("replicatedJobs", ()):
            head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}}
            kubernetes_validate.validate({**head, **job["template"]}, RELEASE, strict=True)
        for _, pod in pods(one):
            head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x", **pod["metadata"]}}
            kubernetes_validate.validate({**head, "spec": pod["spec"]}, RELEASE, strict=True)


@pytest.mark.slow
def test_every_pod_is_one_of_the_run_and_may_reach_the_others() -> None:
    (policy,) = every("NetworkPolicy")
    (monitor,) = every("PodMonitor")
    wanted = policy["spec"]["podSelector"]["matchLabels"]
    assert monitor["spec"]["selector"]["matchLabels"] == wanted
    assert policy["spec"]["ingress"][0]["from"] == [{"podSelector": {"matchLabels": wanted}}]
    found = [pod for name in FILES for one in documents(name) for _, pod in pods(one)]
    assert len(found) == 5
    for pod in found:
        assert wanted.items() <= pod["metadata"]["labels"].items()
        assert pod["spec"]["automountServiceAccountToken"] is False
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        claimed = {
            claim["metadata"]["name"]
            for one in every("StatefulSet")
            for claim in one["spec"].get("volumeClaimTemplates", ())
        }
        for one in pod["spec"]["containers"]:
            mounts = {mount["name"]: mount["mountPath"] for mount in one["volumeMounts"]}
            assert mounts.keys() <= volumes.keys() | claimed
            if "agent" in one["command"]:
                continue  # which gets the operators' token as a variable, and a member's for its replicas
            secret = volumes["token"]["secret"]
            assert secret["secretName"] == "replicas-token"
            assert ("items" in secret) == (one["name"] != "supervisor"), "members get the member token alone"
            assert secret.get("items", [{"key": "token", "path": "token"}]) == [{"key": "token", "path": "token"}]
            assert mounts["token"] == "/etc/replicas-token"


def test_members_find_the_supervisor_and_name_groups_of_its_config() -> None:
    read = config()
    (service,) = [one for one in every("Service") if one["metadata"]["name"] == "replicas"]
    for name in (*ROLLOUTS, "trainer-jobset.yaml"):
        variables = environment(container(name), FIELDS)
        found = environ.read(variables)
        assert found.endpoint == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
        assert found.run == read.run.name
        assert found.group in read.groups
        assert found.replica is not None
        assert str(found.token_file) == "/etc/replicas-token/token"
        assert not {key for key in variables if key.startswith("REPLICA")} - {
            environ.ENDPOINT,
            environ.TOKEN_FILE,
            environ.RUN,
            environ.GROUP,
            environ.REPLICA,
        }


def test_sizes_are_those_of_the_config() -> None:
    groups = config().groups
    assert all(group.external for group in groups.values())
    for kind in ("Deployment", "LeaderWorkerSet"):
        (rollout,) = every(kind)
        assert rollout["spec"]["replicas"] == groups["rollout"].replicas
    assert every("LeaderWorkerSet")[0]["spec"]["leaderWorkerTemplate"]["size"] == groups["rollout"].world_size
    (job,) = every("JobSet")[0]["spec"]["replicatedJobs"]
    assert job["template"]["spec"]["completions"] == job["template"]["spec"]["parallelism"] == groups["trainer"].nnodes
    words = container("trainer-jobset.yaml")["command"]
    assert f"--nnodes={groups['trainer'].nnodes}" in words
    assert f"--nproc-per-node={groups['trainer'].nproc_per_node}" in words


def test_the_supervisor_is_told_where_it_is_and_has_time_to_drain() -> None:
    read, one = config(), container("supervisor.yaml")
    (stateful,) = [one for one in every("StatefulSet") if one["metadata"]["name"] == "replicas"]
    pod = stateful["spec"]["template"]["spec"]
    ports = {port["name"]: port["containerPort"] for port in one["ports"]}
    assert (read.control.host, read.control.port) == (f"{stateful['metadata']['name']}-0", ports["control"])
    assert (read.store.bind, read.store.port) == (read.control.host, ports["store"])
    mounts = {mount["mountPath"] for mount in one["volumeMounts"]}
    assert read.run.state_dir.parent in {Path(path) for path in mounts}
    program, command, path = one["command"]
    assert (program, path) == ("replicas", "/etc/replicas/run.toml")
    assert command in {info.name or getattr(info.callback, "__name__", "") for info in cli.app.registered_commands}
    slowest = max(group.drain_timeout_s + group.stop_timeout_s for group in read.groups.values())
    assert pod["terminationGracePeriodSeconds"] >= slowest + 10
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert one[probe]["httpGet"] == {"path": "/livez", "port": "control", "scheme": "HTTPS"}


def test_agents_join_the_run_have_what_its_groups_need_and_time_to_drain() -> None:
    read, one = config("agents.yaml"), container("agents.yaml")
    (stateful,) = [found for found in every("StatefulSet") if found["metadata"]["name"] == "agent"]
    variables = environment(one, FIELDS | SECRETS)
    (service,) = [found for found in every("Service") if found["metadata"]["name"] == "replicas"]
    joined = Invitation(variables[JOIN])
    assert joined.endpoint == f"{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    assert joined.token == SECRETS["replicas-token/operator-token"].strip()
    assert all(name.startswith("REPLICAS_") for name, value in variables.items() if joined.token in value)
    program, command = one["command"]
    assert (program, command) == ("replicas", cli_agent.agent.__name__)
    options = dict(zip(one["args"][::2], one["args"][1::2], strict=True))
    assert expanded(options["--address"], variables) == FIELDS["status.podIP"]
    same = config()
    assert (read.run.state_dir, read.control, read.store) == (same.run.state_dir, same.control, same.store)
    assert not read.cluster.local, "no other node of the run would have GPUs"
    for group in read.groups.values():
        assert {f"{name}={value}" for name, value in group.placement.labels.items()} == {options["--label"]}
    gpus = sum(group.replicas * group.world_size * (group.resources.gpus or 0) for group in read.groups.values())
    assert gpus <= stateful["spec"]["replicas"] * int(one["resources"]["limits"]["nvidia.com/gpu"])
    slowest = max(group.drain_timeout_s + group.stop_timeout_s for group in read.groups.values())
    pod = stateful["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= slowest + 10
    mounts = {mount["name"]: Path(mount["mountPath"]) for mount in one["volumeMounts"]}
    assert Path(options["--state-dir"]).parent == mounts["state"]
    assert mounts["config"] == Path("/etc/replicas"), "the working folder of groups that name none"


def test_a_server_is_ready_when_its_gate_is_open() -> None:
    one = container("rollout-deployment.yaml")
    assert one["readinessProbe"]["httpGet"]["path"] == READYZ
    arguments = [*one["command"], *one["args"]]
    assert arguments[:4] == ["python", "-m", "replicas.integrations.vllm", "serve"]
    assert int(arguments[arguments.index("--port") + 1]) == one["ports"][0]["containerPort"]
    assert environment(one, FIELDS)[environ.REPLICA] == "auto"


def test_the_readme_names_every_file() -> None:
    text = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"`([\w-]+\.yaml)`", text)) == set(FILES)
