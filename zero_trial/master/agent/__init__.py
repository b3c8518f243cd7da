"""What runs trials on this machine: processes, their environment, ports, slots and logs."""
