"""Parameters and states that are stored off the device where the rank computes.

regions       host memory as a region, and the ring of buffers in front of regions
region_file   a region of unnamed files on disks, one in each folder
copies        copies between a device and its host
homes         parameters and masters in regions, between uses
update_store  updates of values in regions, and on the host for parameters on a device
moved_states  states that a script temporarily moves to the host
"""
