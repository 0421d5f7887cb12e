"""Common parts of several integrations: model folders, refits, ``serve`` commands,
release checks. This package imports no framework."""
