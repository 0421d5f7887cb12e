"""Memory that processes of one host share: whose it is, and who holds it. No torch."""
