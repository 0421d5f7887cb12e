"""Operations between peers: posts, pairing, attempts and verdicts."""
