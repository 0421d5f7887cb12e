"""Memory of other processes on the same host, found and held; which lines of memory
differ. Does not import torch."""
