"""Find and hold memory of other processes on the same host. Does not import torch."""
