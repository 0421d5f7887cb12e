"""The rank's side of sidecars: fork them, send requests, kill them."""
