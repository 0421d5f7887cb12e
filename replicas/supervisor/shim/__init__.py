"""The shim, which owns a replica's processes on one node, and its helpers."""
