"""A worker of an elastic job speaks with the driver. What decides lies beside this package, and has no sockets."""
