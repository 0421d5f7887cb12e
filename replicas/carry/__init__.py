"""Move versions between hosts over TCP, in a process without torch beside each rank.

    rank_side.Carrier -> wire -> carrier process: serve.Server -> TCP -> pull.Pull

A rank starts one carrier and sends it the descriptors of its slots. The carrier serves
versions out of these slots, and pulls versions from other hosts' carriers into them,
in blocks (``blocks``), whole or as deltas (``delta``), each block verified by digest.

The room decides nothing: the coordinator picks holders and makes secrets, the rank
picks slots. Members of one host map each other's memory instead.

*Connections of a pull.* Two at first, or ``pull.FIRST_FAR`` to a holder that was far
the last time, as a connection needs round trips to gain speed, and a small delta ends
before that. While blocks wait to be requested, and the rate has grown by ``pull.PAYS``
since the number last doubled, the number doubles again, up to ``pull.MOST``. With fewer
blocks than connections, each connection takes one block.
"""
