"""``nvme:///mnt/nvme0/l3``: slabs on a local drive, shared by all processes of a machine."""
