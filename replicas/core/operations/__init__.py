"""Operations in process groups: collectives of peers, and broadcasts of versions.

Post -> `Matching` matches posts to an `Operation` -> `Operations` runs attempts in
lanes -> OperationEnd to all participants. A transfer starts the broadcast of a version
without posts, and is told of its end. Pure state machines: no I/O, no clock, no
tensors.
"""
