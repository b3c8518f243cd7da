"""Runs trials on this machine or a cluster: processes, environment, ports, slots and logs."""
