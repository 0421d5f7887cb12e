"""The state folder of a run."""
