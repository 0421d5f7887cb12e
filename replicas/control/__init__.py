"""The control port: health, metrics and status pages, event and log streams, orders."""
