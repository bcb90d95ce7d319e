def make_provider(given: dict[str, int], tag: int, size: int) -> object:
    """Return a provider of carriers over MPI, for `Engine`.

    `given` has the addresses of the functions and the handles, by the names of `engine_mpi` (platform/mpi.h). `tag` is
    the first message tag of the world, `size` its number of ranks.
    """
