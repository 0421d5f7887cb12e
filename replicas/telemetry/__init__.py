"""Events of a run, and the counters and metrics derived from them."""
