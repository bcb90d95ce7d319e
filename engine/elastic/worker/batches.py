"""`engine.elastic.loop`: batches of all epochs, over whatever ranks there are, with commits between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ... import logs, place
from ...forms import whole_number
from ..samplers import ElasticBatchSampler, ElasticSampler
from ..state import ObjectState, Progress

Feed = Callable[[], Iterable[Any]]  # begins an iteration behind what the sampler has recorded


def loop(
    state: ObjectState,
    loader: Any,
    epochs: int,
    *,
    batch_size: int | None = None,
    sampler: Any = None,
    commit_every: int = 50,
    on_epoch: Callable[[int], Any] | None = None,
) -> Iterator[Any]:
    """The batches of this rank that are still to be trained, of all epochs.

    It belongs into the function that `elastic.run` wraps: what the body of a loop raises never reaches an iterator, so
    none could begin the body again. When that function is called again, the loop goes on behind the newest commit, with
    what is left of the epoch cut for the ranks that there are then.

    A batch counts as trained when the next one is asked for. There is a commit after every `commit_every` batches, and
    at the end of each epoch.

    Parameters
    ----------
    state : ObjectState
        Or a state of a framework, such as `engine.torch.elastic.TorchState`. It keeps how far the loop is; if it has a
        value `epoch`, that counts the epochs that are done.
    loader : DataLoader, array, sequence of arrays, or callable
        A `torch.utils.data.DataLoader`, which is made anew with an `ElasticSampler`, that shuffles if its sampler does;
        one that has an `ElasticSampler` or an `ElasticBatchSampler` is used as it is. Or arrays of one length, of NumPy
        or JAX: a batch is the rows of each. Or a function that makes an iterable of batches of the sampler's indices,
        such as a `tf.data.Dataset`, which is called with the sampler at each beginning.
    epochs : int
        In all; those of earlier loops with the same state, such as one over other data, are among them.
    batch_size : int, optional
        Of a rank, for arrays and functions; a loader of torch has its own.
    sampler : ElasticSampler or ElasticBatchSampler, optional
        For functions it is needed; for arrays an `ElasticSampler` with its defaults is made.
    commit_every : int
        Batches.
    on_epoch : callable, optional
        Called with the number of an epoch behind its last batch, before the commit.

    Yields
    ------
    object
        A batch.

    Raises
    ------
    TypeError, ValueError
        What cannot be cut for a changing number of ranks, and what to give instead.
    HostsUpdatedInterrupt
        From a commit, for `elastic.run`.
    """
    commit_every, epochs = whole_number("commit_every", commit_every, 1), whole_number("epochs", epochs, 0)
    feed, chosen, size = _feed_of(loader, batch_size, sampler)
    return _batches(state, feed, chosen, size, epochs, commit_every, on_epoch)


def _batches(
    state: ObjectState,
    feed: Feed,
    sampler: Any,
    batch_size: int,
    epochs: int,
    commit_every: int,
    on_epoch: Callable[[int], Any] | None,
) -> Iterator[Any]:
    _begin(state, sampler, epochs)
    since = 0
    with _bar(epochs) as show:
        while state.progress.epoch < epochs:
            epoch = state.progress.epoch
            left = feed() if len(sampler) else ()  # a reset may come behind the last batch of an epoch
            for number, batch in enumerate(left):
                yield batch
                sampler.count_batch(number, batch_size)
                state.progress = Progress(epoch, sampler.done)
                show(epoch, sampler)
                since += 1
                if since >= commit_every or state.owed:
                    since = 0
                    state.commit()
            if on_epoch is not None:
                on_epoch(epoch)
            sampler.set_epoch(epoch + 1)
            state.progress = Progress(epoch + 1)
            if "epoch" in vars(state):
                vars(state)["epoch"] = epoch + 1
            since = 0
            state.commit()


def _begin(state: ObjectState, sampler: Any, epochs: int) -> None:
    """Bring the sampler to where the state is, and say so if that is in the middle."""
    progress, length = state.progress, len(sampler.dataset)
    if progress.epoch >= epochs:
        return  # Whatever is done beyond was done by a later loop, perhaps over other data.
    sampler.load_state_dict({"epoch": progress.epoch, "done": progress.done, "length": length})
    if state.committed and place.rank() == 0:
        logs.logger.info(
            "%d ranks go on in epoch %d behind %d samples of %d",
            place.size(),
            progress.epoch,
            sampler.done,
            length,
        )


def _feed_of(loader: Any, batch_size: int | None, sampler: Any) -> tuple[Feed, Any, int]:
    """What begins an iteration, the sampler that it goes by, and the size of a rank's batch."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(loader, torch_data.DataLoader):
        if batch_size is not None or sampler is not None:
            raise ValueError("a DataLoader has its own batch size and sampler: give loop() neither")
        made, own, size = import_module("...torch.loaders", __package__).elastic(loader)
        return lambda: made, own, size
    whole = isinstance(sampler, ElasticBatchSampler)
    if batch_size is None and not whole:
        raise ValueError("loop() needs batch_size, the samples of a rank in a step, as the loader is none of torch")
    if callable(loader):
        if sampler is None:
            raise ValueError("loop() needs sampler=ElasticSampler(range(LENGTH)), by which the function makes batches")
        return lambda: loader(sampler), sampler, batch_size or 1
    arrays = _arrays(loader)
    if sampler is None:
        sampler = ElasticSampler(range(len(arrays[0])))
    single = arrays is not loader and not isinstance(loader, list | tuple)

    def rows() -> Iterator[Any]:
        for indices in iter(sampler) if whole else _chunks(list(sampler), batch_size or 1):
            batch = tuple(each[np.asarray(indices)] for each in arrays)
            yield batch[0] if single else batch

    return rows, sampler, batch_size or 1


def _arrays(loader: Any) -> tuple[Any, ...]:
    arrays = tuple(loader) if isinstance(loader, list | tuple) else (loader,)
    if not arrays or not all(hasattr(each, "shape") and hasattr(each, "__getitem__") for each in arrays):
        raise TypeError(
            f"loop() takes a DataLoader of torch, arrays, or a function from a sampler to batches, not "
            f"{type(loader).__module__}.{type(loader).__qualname__}: an iterable alone cannot be cut for other ranks"
        )
    if len({len(each) for each in arrays}) > 1:
        raise ValueError(f"loop() was given arrays of different lengths: {[len(each) for each in arrays]}")
    return arrays


def _chunks(indices: list[int], size: int) -> Iterator[list[int]]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


@contextmanager
def _bar(epochs: int) -> Iterator[Callable[[int, Any], None]]:
    """A progress bar on rank 0, where there is a terminal, and rich to draw it."""
    if place.rank() or not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda epoch, sampler: None
        return
    console = import_module("rich.console").Console(stderr=True)
    with import_module("rich.progress").Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(epoch: int, sampler: Any) -> None:
            text = f"epoch {epoch + 1} of {epochs}"
            progress.update(task, description=text, total=len(sampler.dataset), completed=sampler.done)

        yield show
