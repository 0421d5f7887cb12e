"""Collectives and point-to-point operations between peers, on the member's side."""
