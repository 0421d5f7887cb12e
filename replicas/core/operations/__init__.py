"""Operations between peers: posts, pairing, attempts and verdicts.

Post -> `Matching` matches posts to an `Operation` -> `Operations` runs attempts in
lanes -> OperationEnd to all participants. Pure state machines: no I/O, no clock, no
tensors.
"""
