"""Shared memory for versions: arenas, slots and mappings."""
