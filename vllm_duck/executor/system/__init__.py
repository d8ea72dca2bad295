"""The operating system: processes, processors, memory, temporary directories."""
