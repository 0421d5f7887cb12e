"""Memory and copies on GPUs."""
