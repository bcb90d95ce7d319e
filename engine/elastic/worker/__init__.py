"""A worker of an elastic job: what speaks with the driver. The modules beside this package decide, and have no sockets."""
