"""One transfer of a version: lanes, paths, pace, and who is at fault when it fails."""
