"""The page of a run: its files, and what it shows, live or of a run that is over."""
