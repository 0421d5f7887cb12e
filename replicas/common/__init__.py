"""What all rooms use: decoding, text from elsewhere, waits, backoff."""
