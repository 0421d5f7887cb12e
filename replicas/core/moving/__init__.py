"""Move a version from its holders to the members that need it.

Flow: :class:`~.transfer.Transfer` -> plan (:mod:`.paths`) -> :class:`~.attempt.Attempt`
-> lane (:mod:`.lanes`) or deliveries (:mod:`.pull_tasks`) -> digests compared ->
complete, or the next attempt. No bytes pass through here: members map, send or pull
them. Versions are numbered and committed in :mod:`replicas.core.versions`.
"""
