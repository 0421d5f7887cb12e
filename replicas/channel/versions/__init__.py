"""Publish, receive and hold versions, on the member's side.

Source: `Publisher` fills a slot -> Packed -> commit. Target: offer -> `Transfers` pulls
or maps -> commit -> `Receiver` hands out an `Update` -> load -> Loaded. The coordinator
numbers, routes and commits versions; nothing here does.

Receiving
=========

There is at most one ask. Its Pending stays the answer of :meth:`Receiver.receive` until
a caller has taken the update; an abandoned wait loses nothing. A grant may come before
the slot is complete here: the update is delivered, and pins the slot, once complete.

A delivered update that no caller has waited for is withdrawn as soon as a newer version
is committed and held here: the Pending becomes pending again, and gets the newest. The
rank asks the coordinator again, because another rank of the replica may have begun with
the old version: then all ranks load that one. So a receive ahead of time blocks no
publish, and gets the newest version. An update that was handed out but not touched does
not count as taken: an interrupt may have hit the caller between the two. The next
receive hands it out again, or asks for a newer one.

*Suspended process.* After a pause of this process, the versions of queued messages and
of an update not yet handed out may be out of date: another incarnation of the replica
may have overtaken them. So the rank drops those, and asks again.

*At least.* The coordinator decides which version satisfies all ranks of the replica
(:mod:`replicas.core.versions.load_rounds`). A version that was granted because another
rank has begun with it, but is below the bound here, is declined, and the rank asks for
a newer one. A receive with another bound replaces the one under way, unless its update
has been handed out. If the version served here satisfies the bound, and none is newer,
it is handed out again, to all ranks with that bound.

A new coordinator gets the open ask again, and repeats an undelivered grant. An open
update stays open, and is reported again, as is the last load if it failed.

Publishing
==========

**Several hosts.** When all tensors are known before the first is copied (a module, a
mapping), no user code can delay the walk. The version is then sent while it is packed:
Packed(streaming) goes out as soon as there is a slot, Filled when there is a digest.

**In order.** The coordinator refuses a version that a newer one has overtaken. A packed
publish is therefore announced only when every earlier one was announced or can no
longer be packed (:meth:`Publisher._announce`).

**Our own failure** (no memory, no slot, unusable tensors, not admitted): the weights
are still walked to the end, then the error is raised. PackFailed goes out first, so
that the other ranks need not wait, and the error raised is the verdict that returns,
the same on all ranks of the replica. **The user's own exception** passes through
unchanged, after PackFailed: the walk has ended. A failure that no caller was told of
fails the leader's next publish in the same way, so that the ranks agree.

Without a verdict a publish ends :data:`~replicas.channel.session.hub.GRACE_S` after its
deadline; once packed, with OutcomeUnknown, because the coordinator may have decided. It
is then *unsettled*, and its slot pinned, until a late verdict, commit or discard comes.

**A new coordinator** gets every open or unsettled publish: its number, and the result
of its packing. It continues them, and gives the verdict of those that its predecessor
had decided. A publish without a number begins again.
"""
