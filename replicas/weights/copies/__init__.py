"""Copies and digests of bytes in host memory, and the seam to other devices."""
