"""Memory that ranks of one host share: an arena per rank, collectives and small values through it,
and the probe whether ranks can share."""
