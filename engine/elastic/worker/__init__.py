"""What a worker of an elastic job needs of the engine: the modules here may wait, and talk to other processes."""
