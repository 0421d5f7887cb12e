"""Events of a run, and the counters and metrics that follow from them."""
