"""Device. The codes by which a position's rule is named in an array."""

GREEDY = 0
STANDARD = 1
COUPLED = 2
BLOCK = 3
