"""Labels that the encoder of metrics keeps between two readings."""

from __future__ import annotations

import pytest

pytest.importorskip("prometheus_client")

from prometheus_client.core import GaugeMetricFamily

from engine.metrics.export.encoding import Encoder


def _encode_group(encoder: Encoder, name: str) -> bytes:
    family = GaugeMetricFamily("engine_group", "About a group.", labels=["group"])
    family.add_metric([name], 1.0)
    return encoder.encode([family], openmetrics=False)


def test_labels_of_groups_that_are_gone_are_let_go() -> None:
    """A job may form and leave groups as long as it runs, each with a name of its own."""
    encoder = Encoder()
    for number in range(100):
        assert f'{{group="tp ({number})"}} 1.0\n'.encode() in _encode_group(encoder, f"tp ({number})")
    assert len(encoder._labels) == 1
    assert len(encoder._former) == 1
    written = next(iter(encoder._labels.values()))
    _encode_group(encoder, "tp (99)")
    assert next(iter(encoder._labels.values())) is written
