"""The replicas of a run, in the supervisor: start, watch, restart and end them."""
