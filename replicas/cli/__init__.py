"""The command line ``replicas``."""
