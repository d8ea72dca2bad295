"""Another host on this machine: a network namespace behind links. Needs root."""
