"""A Determined master for one machine: it serves Determined's ``det`` command and harness on
loopback, and stores its state in one SQLite file."""
