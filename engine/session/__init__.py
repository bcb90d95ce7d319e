"""The session of this process: the engine with its world, its process sets, and the services beside it."""
