"""Environment variables that Kubernetes sets in every container and that look like settings of the engine.

For each Service of a namespace, its containers get `NAME_PORT=tcp://ADDRESS:PORT`. So a Service called
`engine-metrics` sets `ENGINE_METRICS_PORT`.
"""

from __future__ import annotations

from collections.abc import Mapping

_PROTOCOLS = ("tcp://", "udp://", "sctp://")


def service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """Find the engine's variables whose values are addresses of Services; nobody has chosen these as settings."""
    return {
        name: value
        for name, value in environ.items()
        if name.startswith("ENGINE_") and name.endswith("_PORT") and value.strip().lower().startswith(_PROTOCOLS)
    }
