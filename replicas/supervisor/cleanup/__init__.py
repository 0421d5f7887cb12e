"""Clean up after the processes of a run: control groups, the janitor, leftovers."""
