"""The connection of a rank to the coordinator: its session, its loop, its sidecars."""
