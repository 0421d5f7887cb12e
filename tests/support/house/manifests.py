"""The manifests of services/kubernetes, as a cluster would read them."""

from __future__ import annotations

import re
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from tests.support.root import ROOT

__all__ = ["FOLDER", "container", "documents", "environment", "expanded", "pods", "status_of"]

FOLDER = ROOT / "services" / "kubernetes"
_UNVERIFIED = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_UNVERIFIED.check_hostname, _UNVERIFIED.verify_mode = False, ssl.CERT_NONE  # as a kubelet's
_POD_LISTS = ("containers", "initContainers")


def documents(name: str) -> list[dict[str, Any]]:
    """The objects of one file."""
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def pods(one: object, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Each pod template in an object, with the path to it."""
    if isinstance(one, dict):
        if isinstance(one.get("spec"), dict) and "containers" in one["spec"]:
            yield path, one
        else:
            for key, value in one.items():
                yield from pods(value, f"{path}.{key}")
    elif isinstance(one, list):
        for index, value in enumerate(one):
            yield from pods(value, f"{path}[{index}]")


def container(name: str) -> dict[str, Any]:
    """The only container of the only pod of a file."""
    ((_, pod),) = [found for document in documents(name) for found in pods(document)]
    (one,) = pod["spec"]["containers"]
    found: dict[str, Any] = one
    return found


def environment(one: Mapping[str, Any], fields: Mapping[str, str]) -> dict[str, str]:
    """The variables of a container.

    ``fields``: values by the path of a pod's field, or the name and key of a secret.
    """
    found: dict[str, str] = {}
    for variable in one["env"]:
        if "value" in variable:
            found[variable["name"]] = expanded(variable["value"], found)
        elif "secretKeyRef" in variable["valueFrom"]:
            secret = variable["valueFrom"]["secretKeyRef"]
            found[variable["name"]] = fields[f"{secret['name']}/{secret['key']}"]
        else:
            found[variable["name"]] = fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
    return found


def expanded(text: str, variables: Mapping[str, str]) -> str:
    """What Kubernetes makes of ``$(NAME)`` in a command, an argument or a variable."""
    return re.sub(r"\$\((\w+)\)", lambda found: variables[found[1]], text)


def status_of(url: str) -> int:
    """What a probe gets: the status of the answer; 0: there is none."""
    try:
        with urllib.request.urlopen(url, timeout=10, context=_UNVERIFIED) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except OSError:
        return 0
