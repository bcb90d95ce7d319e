"""Measurements on several hosts: allreduce over TCP, training, idle jobs, beside other libraries and bare sockets."""
