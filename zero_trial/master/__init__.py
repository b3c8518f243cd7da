"""A Determined master for one machine: it answers Determined's ``det`` command and
harness, on loopback, from one SQLite file."""
