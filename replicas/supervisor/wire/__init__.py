"""What the supervisor, agents, shims and log pumps say to each other."""
