"""Helpers for all packages: decoding, untrusted text, waits, backoff."""
