"""The DeepSeek-V3.2 modules that run on the host."""
