"""GPU memory: allocation, sharing between processes, copies and digests."""
