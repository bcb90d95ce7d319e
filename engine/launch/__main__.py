"""`python -m engine.launch`, the same as `enginerun`."""

from __future__ import annotations

import sys

from engine.launch.cli import main

sys.exit(main())
