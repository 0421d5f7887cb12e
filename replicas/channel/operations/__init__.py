"""Collectives and point-to-point operations between peers, on the member's side.

Check (`Collectives`) -> copy the inputs (`Scratch`) -> post -> Go -> sidecar -> verdict
-> write the results -> resolve the `Pending`. The coordinator matches the calls of
the peers and decides on retries (:mod:`replicas.core.operations`).
"""
