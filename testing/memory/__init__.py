"""Memory that is weighed, and memory that fails."""
