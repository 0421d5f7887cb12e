"""What the rest of the core builds on: effects, state tables, manifests."""
