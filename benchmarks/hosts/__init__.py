"""Several hosts: allreduce over TCP beside other libraries and bare sockets, training beside DDP, and idleness."""
