"""Puts this directory on the import path: `ranks` runs programs on N ranks through the real launcher."""

import signal

# A process that a shell has started in the background ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)
