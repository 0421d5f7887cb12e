"""Helpers for all packages: decoding, untrusted text, waits, backoff, state tables.

They import nothing of the library but ``errors`` and ``environ``, and know nothing of
versions, replicas or the kernel (:mod:`replicas.linux` does).
"""
