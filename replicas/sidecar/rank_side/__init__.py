"""The rank's side of sidecars: starting them, asking them, ending them."""
