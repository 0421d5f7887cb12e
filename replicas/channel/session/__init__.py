"""The connection of a rank to the coordinator: its session, its loop, its sidecars.

User's thread -> `SessionLoop.call` -> `Hub` -> `Session` -> coordinator; replies go
through `Hub.handle` to the `Part` that handles their type. No weights pass here.

**Two ways to lose the coordinator.** A broken connection alone changes nothing: the
session resumes after the reconnect. A new coordinator (another term) knows of this
member only its Hello. Each part then announces its open work again (publishes,
requests, watches) or ends it (transfers, lanes), and ``Resumed`` concludes the
announcement. Messages queued for the old coordinator were discarded, so changes between
the Hello and the Welcome are announced first. Each operation has a local timer.
"""
