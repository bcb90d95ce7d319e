"""Variables that Kubernetes puts into the environment of every container, where they look like settings of the engine.

For each Service of a namespace its containers get `NAME_PORT=tcp://ADDRESS:PORT`, so that a Service called
`engine-metrics` sets `ENGINE_METRICS_PORT`.
"""

from __future__ import annotations

from collections.abc import Mapping

_PROTOCOLS = ("tcp://", "udp://", "sctp://")


def service_links(environ: Mapping[str, str]) -> dict[str, str]:
    """Find the variables of the engine whose values are addresses of Services.

    Parameters
    ----------
    environ : mapping
        Of the process.

    Returns
    -------
    dict of str to str
        The values, by variable; nobody has chosen them, so they are no settings.
    """
    return {
        name: value
        for name, value in environ.items()
        if name.startswith("ENGINE_") and name.endswith("_PORT") and value.strip().lower().startswith(_PROTOCOLS)
    }
