def replay_stores(times: list[tuple[int, int, int]]) -> list[int]:
    """Choose the kind of store for entries, one after another; return the kinds as numbers. For tests.

    Each entry is a tuple of its bytes, and the nanoseconds that it takes with cached and with streaming stores.
    """
