"""The schema of LeaderWorkerSet, ``leaderworkerset.x-k8s.io/v1``, for which no released
package has models: <https://lws.sigs.k8s.io/docs/reference/leaderworkerset.v1/>. The
pods in it are read by Kubernetes' own schemas."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

__all__ = ["LeaderWorkerSet"]

_Count = Annotated[int, msgspec.Meta(ge=0)]
_Portion = _Count | Annotated[str, msgspec.Meta(pattern=r"^[0-9]+%$")]


class _Strict(msgspec.Struct, forbid_unknown_fields=True, rename="camel"):
    pass


class SubGroupPolicy(_Strict):
    sub_group_policy_type: Literal["LeaderWorker", "LeaderExcluded"] = "LeaderWorker"
    sub_group_size: _Count | None = None


class RetentionPolicy(_Strict):
    when_deleted: Literal["Retain", "Delete"] = "Retain"
    when_scaled: Literal["Retain", "Delete"] = "Retain"


class LeaderWorkerTemplate(_Strict):
    worker_template: dict[str, Any]
    leader_template: dict[str, Any] | None = None
    size: Annotated[int, msgspec.Meta(ge=1)] = 1
    restart_policy: Literal["Default", "RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"] = (
        "RecreateGroupOnPodRestart"
    )
    sub_group_policy: SubGroupPolicy | None = None
    volume_claim_templates: list[dict[str, Any]] | None = None
    persistent_volume_claim_retention_policy: RetentionPolicy | None = None


class RollingUpdate(_Strict):
    max_surge: _Portion = 0
    max_unavailable: _Portion = 1
    partition: _Count = 0


class RolloutStrategy(_Strict):
    type: Literal["RollingUpdate"]
    rolling_update_configuration: RollingUpdate | None = None


class NetworkConfig(_Strict):
    subdomain_policy: Literal["Shared", "UniquePerReplica"]


class Spec(_Strict):
    leader_worker_template: LeaderWorkerTemplate
    replicas: _Count = 1
    startup_policy: Literal["LeaderCreated", "LeaderReady"] = "LeaderCreated"
    rollout_strategy: RolloutStrategy | None = None
    network_config: NetworkConfig | None = None


class LeaderWorkerSet(_Strict):
    api_version: Literal["leaderworkerset.x-k8s.io/v1"]
    kind: Literal["LeaderWorkerSet"]
    metadata: dict[str, Any]
    spec: Spec
