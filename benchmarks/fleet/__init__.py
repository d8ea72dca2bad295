"""A fleet of paced ducks behind links of their own, and the host's code before it."""
