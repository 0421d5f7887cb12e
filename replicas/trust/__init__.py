"""Trust off loopback: join tokens, the control port's key, and TLS on both sides."""
