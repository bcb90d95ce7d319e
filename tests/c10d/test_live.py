"""Objects that others keep alive, while threads add some and let go of others."""

from __future__ import annotations

import threading

from engine.c10d.membership import LiveObjects


class Thing:
    """Object of no content."""


def test_objects_are_listed_in_order_as_long_as_somebody_keeps_them() -> None:
    found: LiveObjects[Thing] = LiveObjects()
    kept = [Thing() for _ in range(3)]
    for each in kept:
        found.add(each)
    found.add(Thing())
    assert found.list_items() == kept
    last = kept.pop()
    del kept[0]
    assert found.list_items() == [*kept, last]
    assert len(found._references) == 2


def test_threads_may_add_and_let_go_while_others_look() -> None:
    found: LiveObjects[Thing] = LiveObjects()
    stop = threading.Event()
    failed: list[BaseException] = []

    def come_and_go() -> None:
        while not stop.is_set():
            kept = [Thing() for _ in range(50)]
            for each in kept:
                found.add(each)

    def look() -> None:
        try:
            for _ in range(2000):
                found.list_items()
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=come_and_go) for _ in range(3)]
    for each in threads:
        each.start()
    look()
    stop.set()
    for each in threads:
        each.join(30.0)
    assert not failed
    assert found.list_items() == []
