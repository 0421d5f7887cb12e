"""The config file of a run: what it may say, how it is read, and what a change of it
means."""
