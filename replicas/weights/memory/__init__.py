"""Shared memory for versions: arenas, slots, buffers and mappings.

    arena.Arena -> pool.Pool -> buffers.Buffer (memfd or GPU) -> mappings.Mapping

An arena decides which slot a version gets; kernel locks tell it which memory other
processes still read. The room neither fills slots nor opens memory of other hosts.
"""
