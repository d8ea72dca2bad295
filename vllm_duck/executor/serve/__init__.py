"""A duck at work: its kernel behind a server, and local ducks as processes."""
