"""What holds for every test."""

import os
import signal

# What a test finds is not for later jobs, and what earlier ones have found not for tests.
os.environ["ENGINE_AUTOTUNE_CACHE"] = "off"

# What `nohup` or a shell's background has told this process to ignore, all that the tests start would ignore too. A
# handler is not inherited.
signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda *_: None)
