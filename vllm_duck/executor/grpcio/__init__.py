"""The fallback transport: stock grpcio, both ends."""
