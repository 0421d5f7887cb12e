"""The tensors of a model's checkpoint, computed by the libraries that write it: unwrap
-> plan (saving, adapters, recording) -> gather. Names and layouts are never hard-coded
here."""
