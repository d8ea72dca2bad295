"""Drafting, verifying drafts, and the lanes that a step is divided into."""
