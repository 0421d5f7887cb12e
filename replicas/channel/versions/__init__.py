"""Publish, receive and hold versions, on the member's side."""
