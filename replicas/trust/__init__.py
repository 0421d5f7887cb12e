"""Trust off loopback: join tokens, the control port's key, and TLS on both sides.

A token names the hash of the port's key -> the client checks the key within the TLS
handshake -> only then it sends the secret -> the port derives the client's role from
it. The room has no access rules; :mod:`replicas.control.access` has them.
"""
