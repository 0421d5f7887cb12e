"""A member's part in operations between peers."""
