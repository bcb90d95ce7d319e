"""Settings, and the launcher's variables that tell a process its rank: everything that `init` reads.

`Config` lists the settings; `describe` writes the table of `docs/reference/settings.md`.
"""

from .config import Config, describe

__all__ = ["Config", "describe"]
