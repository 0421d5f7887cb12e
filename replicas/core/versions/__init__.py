"""Versions of weights: publishes, commits, manifests, catch-up and recovery."""
