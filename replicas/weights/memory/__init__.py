"""Shared memory for versions: arenas, slots, buffers and mappings."""
