"""Adapters to inference engines and trainers of other projects: trainer -> ``publish``
-> channel -> follower -> engine. No other room of this package imports them, and each
imports its framework only when it is used."""
