"""Versions of a channel: publish, manifests, commit, load, and recovery.

Flow: ranks pack (:mod:`.publishes`) -> manifests joined (:mod:`.manifests`) -> transfer
(:mod:`replicas.core.moving`) -> commit (:mod:`.commits`) -> grant to all ranks of a
replica (:mod:`.rounds`). Targets that missed a version get it later (:mod:`.catch_up`).
The bytes of a version are never here, only its manifest.
"""
