"""A member's part in versions: publishing, receiving and holding them."""
