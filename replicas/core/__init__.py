"""Pure state machines of channels and replicas: no I/O, no clock, no torch.

Flow: event (message, tick, loss) -> :class:`~replicas.core.channel_state.ChannelState`
-> effects (:mod:`replicas.core.base.effects`), which
:class:`replicas.coordinator.engine.Engine` applies in order. Time comes in as an
argument. Nothing here opens a file or a socket, starts a thread or a process, or waits.
"""
