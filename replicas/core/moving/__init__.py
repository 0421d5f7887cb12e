"""Transfers: moving a version between members, and finding the fault when one fails."""
