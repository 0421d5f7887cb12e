"""Nothing outlives its run: control groups, the janitor, leftovers."""
