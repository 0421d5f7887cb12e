"""The connection of a rank to the coordinator: its session, its loop, its sidecars.

User's thread -> `SessionLoop.call` -> `Hub` -> `Session` -> coordinator; replies go
through `Hub.handle` to the `Part` that handles their type. No weights pass here.
"""
