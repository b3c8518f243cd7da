"""What does not stay where the rank computes.

swap_space      what a store needs of a place: reserve, read, write, map
region_file     unnamed files on disks, one in each folder
device_space    a device's place on its host: pinned memory, or a file behind pinned buffers
copies          copies between a device and its host
nvme_optimizer  masters and optimizer state in a file, between updates
nvme_params     parameters in a file, between uses
host_updates    updates on the host for parameters on a device
moved_states    states that a script moves to the host for a while
"""
