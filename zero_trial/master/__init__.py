"""A Determined master for one machine: it serves ``det`` and harness on loopback."""
