"""Who is on a channel: members, their hosts, and who may take part."""
