"""Ducks: wire, shards, kernel, client and server. Neither torch nor vLLM here."""
