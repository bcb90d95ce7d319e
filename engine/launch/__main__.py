"""`python -m engine.launch`, the same as `enginerun`."""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
