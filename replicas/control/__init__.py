"""The control port's pages (health, metrics, status) and the command line that reads
them."""
