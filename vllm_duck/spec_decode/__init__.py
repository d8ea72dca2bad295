"""The method duck_mtp1: drafting, verification, and where drafting stops."""
