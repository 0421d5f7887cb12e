"""Small transformers models with adapters, and what the libraries save of them."""
