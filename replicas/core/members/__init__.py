"""Members of a channel: admission, identity, epoch, lease, and host.

Hello -> :mod:`preflight <replicas.core.members.preflight>` (is it compatible?) ->
:class:`~replicas.core.members.roster.Roster` (member, epoch, lease) ->
:class:`~replicas.core.members.hosts.Hosts` (which memory it shares) ->
:class:`~replicas.core.members.views.Views` (every member learns the epoch).

No I/O and no clock: callers pass the time, and send the messages that this package
appends to its list of effects. It does not decide which versions move.
"""
