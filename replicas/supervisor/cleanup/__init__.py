"""Clean up after the processes of a run: what they have, and what is left of them."""
