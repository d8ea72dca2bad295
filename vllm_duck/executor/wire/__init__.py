"""The wire: messages and their limits, what errors and peers are called, TLS."""
