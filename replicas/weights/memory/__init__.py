"""Shared memory for versions: arenas, slots, buffers and mappings.

    arena.Arena -> pool.Pool -> buffers.Buffer (memfd or GPU) -> mappings.Mapping

An arena decides which slot a version gets; kernel locks tell it which memory other
processes still read. The room neither fills slots nor opens memory of other hosts.

**Readers in other processes** hold this memory by kernel locks
(:mod:`replicas.linux.locks`), even after its version has been released here. The arena
does not wait for two kinds of readers: those that keep a mapping of a version without
its lock, and those that hold a version which no responsive member still holds
(:meth:`Arena.released`: the holder is frozen, and evicted). Their buffer is *retired*,
that is, left to them, and the slot gets another from the
:class:`~replicas.weights.memory.pool.Pool`. The kernel does not report the end of a
lock: to wait for a slot, poll.

A buffer whose file was *shown* (:meth:`Buffer.show`) is never filled again, as its
readers are unknown: the slot gets another, and the kernel frees the old one when it is
neither mapped nor open (:mod:`replicas.weights.memory.still_mapped` finds its users).

Memory that only its owner fills is *closed to writers* before. A sidecar would need its
own mapping before that, so memory that it fills stays open to writers.
"""
