"""The stand-in device: a device of torch's that is not the CPU, on a machine that has no other."""
