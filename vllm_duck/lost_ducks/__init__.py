"""A step that lost a duck: who knows of it, how long it waits, what ends, who looks."""
