"""What ours is measured beside, and what memory and sockets give without it."""
