"""Move a version from its holders to the members that need it.

Flow: :class:`~.transfer.Transfer` -> plan (:mod:`.paths`) -> :class:`~.attempt.Attempt`
-> tasks (:mod:`.task`), or one broadcast (:mod:`replicas.core.operations`) ->
digests compared -> complete, or the next attempt. No bytes pass through here: members
map, pull or broadcast them. Versions are numbered and committed in
:mod:`replicas.core.versions`.
"""
