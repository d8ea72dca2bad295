"""The model families that duck serves: each file here is one, with its FAMILY."""
