"""The agent: the one process of a node that starts, watches and ends its shims."""
