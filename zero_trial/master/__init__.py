"""A Determined master for one machine: it answers ``det`` and the harness, on loopback."""
