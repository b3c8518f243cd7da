"""A Determined master for one machine: it answers the genuine ``det`` command and the genuine
harness, on loopback, from one SQLite file.
"""
