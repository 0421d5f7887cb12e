"""Bytes between hosts: carriers serve slots to other hosts, and pull versions."""
