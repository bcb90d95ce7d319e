"""Data loaders whose batches are made in a separate thread."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest

from engine.data import AsyncDataLoaderMixin, BaseDataLoader

LIMIT = 60.0


class Numbers(BaseDataLoader):
    """Loader of numbers that records the threads that make them, and can be paused."""

    def __init__(self, count: int, fails_at: int = -1) -> None:
        self.count, self.fails_at = count, fails_at
        self.made = 0
        self.makers: set[threading.Thread] = set()
        self.may_make, self.closed = threading.Event(), threading.Event()
        self.may_make.set()

    def __len__(self) -> int:
        return self.count

    def _iterate(self) -> Iterator[int]:
        try:
            for number in range(self.count):
                assert self.may_make.wait(LIMIT)
                self.makers.add(threading.current_thread())
                if number == self.fails_at:
                    raise KeyError(number)
                self.made += 1
                yield number
        finally:
            self.closed.set()

    def _process_batch(self, batch: int) -> tuple[int, bool]:
        return batch, threading.current_thread() is threading.main_thread()


class Ahead(AsyncDataLoaderMixin, Numbers):
    pass


def ended(loader: Ahead) -> bool:
    """Return whether the threads that made batches have ended."""
    for maker in loader.makers:
        maker.join(LIMIT)
    return not any(maker.is_alive() for maker in loader.makers)


@pytest.mark.parametrize("room", [0, 1, 3, 64])
def test_every_pass_gives_every_batch_in_order(room: int) -> None:
    loader = Ahead(room, 10)
    assert len(loader) == 10
    for _ in range(2):
        assert list(loader) == [(number, True) for number in range(10)]
    assert (loader.makers == {threading.main_thread()}) == (room == 0)
    assert room == 0 or ended(loader)
    assert list(Ahead(count=3)) == list(Numbers(3))


def test_batches_are_made_ahead_as_far_as_there_is_room() -> None:
    loader = Ahead(2, 10)
    batches = iter(loader)
    assert next(batches) == (0, True)
    (maker,) = loader.makers
    while loader.made < 4:  # one is in use, two are ready, one waits for room
        maker.join(0.001)
    assert loader.made == 4
    assert [number for number, _ in batches] == list(range(1, 10))


def test_an_error_comes_where_the_batch_would_have() -> None:
    loader = Ahead(64, 5, fails_at=2)
    batches = iter(loader)
    assert [next(batches)[0], next(batches)[0]] == [0, 1]
    with pytest.raises(KeyError, match="2"):
        next(batches)
    assert ended(loader)


def test_an_iteration_that_is_dropped_ends_its_thread() -> None:
    loader = Ahead(1, 1000)
    batches = iter(loader)
    next(batches)
    del batches
    gc.collect()
    assert ended(loader) and loader.closed.wait(LIMIT)
    assert loader.made < 10
    for _, _ in zip(loader, range(3), strict=False):
        pass
    assert list(loader)[-1] == (999, True)


def test_closing_ends_all_iterations() -> None:
    loader = Ahead(1, 1000)
    first, second = iter(loader), iter(loader)
    assert next(first) == next(second) == (0, True)
    loader.close_async_loader()
    assert ended(loader)
    assert list(first) == list(second) == []
    loader.close_async_loader()


def test_a_consumer_that_waits_is_woken() -> None:
    loader, got = Ahead(4, 2), []
    loader.may_make.clear()
    thread = threading.Thread(target=lambda: got.extend(loader))
    thread.start()
    loader.may_make.set()
    thread.join(LIMIT)
    assert [number for number, _ in got] == [0, 1]


@pytest.mark.parametrize("room", [-1, 1.5, "2"])
def test_a_queue_that_cannot_be_is_refused(room: object) -> None:
    with pytest.raises(ValueError, match="async_loader_queue_size is a number of batches"):
        Ahead(room, 3)  # type: ignore[arg-type]


def test_a_loader_that_says_nothing_is_told_what_to_define() -> None:
    with pytest.raises(NotImplementedError, match="define _iterate"):
        list(BaseDataLoader())
    with pytest.raises(TypeError, match="define __len__"):
        len(BaseDataLoader())
