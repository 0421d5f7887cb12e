"""Adapters to other people's engines and trainers; nothing in this package imports
one."""
