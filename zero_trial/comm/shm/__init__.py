"""Memory that ranks of one host share: segments, collectives and messages through them, and the
probe whether they can."""
