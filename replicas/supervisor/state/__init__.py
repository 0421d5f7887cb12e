"""The state folder of a run: lock, identity, saved state."""
