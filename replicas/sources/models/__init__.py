"""What the checkpoint of a model has, by the functions of the libraries that write
it."""
