"""Weights as bytes: memory for them, packing, loading and digests. Imports torch."""
