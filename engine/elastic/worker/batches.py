"""`engine.elastic.loop`: batches of all epochs, over a changing set of ranks, with commits between them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from ...config.forms import whole_number
from ...session import topology
from ...text import logs
from ..samplers import ElasticBatchSampler, ElasticSampler
from ..state import LoopProgress, ObjectState

Feed = Callable[[], Iterable[Any]]  # begins an iteration after the samples that the sampler has recorded


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
    """Iterate over the batches of this rank that are still to be trained, of all epochs.

    Call it in the function that `elastic.run` wraps: an iterator never sees what the body of a loop raises, and so
    cannot start the body again. When that function is called again, the loop goes on from the newest commit. The rest
    of the epoch is then divided among the ranks of the new world.

    A batch counts as trained when the next one is requested. The loop commits after every `commit_every` batches, and
    at the end of each epoch.

    Parameters
    ----------
    state : ObjectState
        Or a state of a framework, such as `engine.torch.elastic.TorchState`. It keeps the loop's progress. If it has a
        value `epoch`, that is set to the number of epochs that are done.
    loader : DataLoader, array, sequence of arrays, or callable
        A `torch.utils.data.DataLoader`, which is recreated with an `ElasticSampler` that shuffles if its sampler does;
        one that has an `ElasticSampler` or an `ElasticBatchSampler` is used unchanged. Or arrays of one length, of
        NumPy or JAX: a batch is a set of rows of each. Or a function that takes the sampler and returns an iterable of
        batches of its indices, such as a `tf.data.Dataset`; it is called at the start of each iteration.
    epochs : int
        Total number of epochs, including those of earlier loops with the same state, such as one over other data.
    batch_size : int, optional
        Number of samples of a rank in a step, for arrays and functions; a loader of torch has its own.
    sampler : ElasticSampler or ElasticBatchSampler, optional
        Required for functions; for arrays the default is an `ElasticSampler` with default options.
    commit_every : int
        Number of batches between commits.
    on_epoch : callable, optional
        Called with the number of an epoch after its last batch, before the commit.

    Yields
    ------
    object
        A batch.

    Raises
    ------
    TypeError, ValueError
        The data cannot be divided among a changing number of ranks; the text says what to give instead.
    HostsUpdatedInterrupt
        From a commit, for `elastic.run`.
    """
    commit_every, epochs = whole_number("commit_every", commit_every, 1), whole_number("epochs", epochs, 0)
    feed, chosen, size = _make_feed(loader, batch_size, sampler)
    return _yield_batches(state, feed, chosen, size, epochs, commit_every, on_epoch)


def _yield_batches(
    state: ObjectState,
    feed: Feed,
    sampler: Any,
    batch_size: int,
    epochs: int,
    commit_every: int,
    on_epoch: Callable[[int], Any] | None,
) -> Iterator[Any]:
    _resume_sampler(state, sampler, epochs)
    since = 0
    with _show_progress(epochs) as show:
        while state.progress.epoch < epochs:
            epoch = state.progress.epoch
            left = feed() if len(sampler) else ()  # empty if a reset came after the last batch of an epoch
            for number, batch in enumerate(left):
                yield batch
                sampler.count_batch(number, batch_size)
                state.progress = LoopProgress(epoch, sampler.done)
                show(epoch, sampler)
                since += 1
                if since >= commit_every or state.owed:
                    since = 0
                    state.commit()
            if on_epoch is not None:
                on_epoch(epoch)
            sampler.set_epoch(epoch + 1)
            state.progress = LoopProgress(epoch + 1)
            if "epoch" in vars(state):
                vars(state)["epoch"] = epoch + 1
            since = 0
            state.commit()


def _resume_sampler(state: ObjectState, sampler: Any, epochs: int) -> None:
    """Move the sampler to the state's position, and log it if training resumes."""
    progress, length = state.progress, len(sampler.dataset)
    if progress.epoch >= epochs:
        return  # Further progress is that of a later loop, perhaps over other data.
    sampler.load_state_dict({"epoch": progress.epoch, "done": progress.done, "length": length})
    if state.committed and topology.rank() == 0:
        logs.logger.info(
            "%d ranks go on in epoch %d behind %d samples of %d",
            topology.size(),
            progress.epoch,
            sampler.done,
            length,
        )


def _make_feed(loader: Any, batch_size: int | None, sampler: Any) -> tuple[Feed, Any, int]:
    """Return the function that begins an iteration, its sampler, and the batch size of a rank."""
    torch_data = sys.modules.get("torch.utils.data")
    if torch_data is not None and isinstance(loader, torch_data.DataLoader):
        if batch_size is not None or sampler is not None:
            raise ValueError("a DataLoader has its own batch size and sampler: give loop() neither")
        made, own, size = import_module("...torch.loaders", __package__).make_elastic(loader)
        return lambda: made, own, size
    whole = isinstance(sampler, ElasticBatchSampler)
    if batch_size is None and not whole:
        raise ValueError("loop() needs batch_size, the samples of a rank in a step, as the loader is none of torch")
    if callable(loader):
        if sampler is None:
            raise ValueError("loop() needs sampler=ElasticSampler(range(LENGTH)), by which the function makes batches")
        return lambda: loader(sampler), sampler, batch_size or 1
    arrays = _check_arrays(loader)
    if sampler is None:
        sampler = ElasticSampler(range(len(arrays[0])))
    single = arrays is not loader and not isinstance(loader, list | tuple)

    def yield_rows() -> Iterator[Any]:
        """Yield this rank's batches of the arrays, in the sampler's order."""
        for indices in iter(sampler) if whole else _split_chunks(list(sampler), batch_size or 1):
            batch = tuple(each[np.asarray(indices)] for each in arrays)
            yield batch[0] if single else batch

    return yield_rows, sampler, batch_size or 1


def _check_arrays(loader: Any) -> tuple[Any, ...]:
    arrays = tuple(loader) if isinstance(loader, list | tuple) else (loader,)
    if not arrays or not all(hasattr(each, "shape") and hasattr(each, "__getitem__") for each in arrays):
        raise TypeError(
            f"loop() takes a DataLoader of torch, arrays, or a function from a sampler to batches, not "
            f"{type(loader).__module__}.{type(loader).__qualname__}: an iterable alone cannot be cut for other ranks"
        )
    if len({len(each) for each in arrays}) > 1:
        raise ValueError(f"loop() was given arrays of different lengths: {[len(each) for each in arrays]}")
    return arrays


def _split_chunks(indices: list[int], size: int) -> Iterator[list[int]]:
    return (indices[start : start + size] for start in range(0, len(indices), size))


@contextmanager
def _show_progress(epochs: int) -> Iterator[Callable[[int, Any], None]]:
    """Show a progress bar on rank 0, if stderr is a terminal and rich is installed."""
    if topology.rank() or not sys.stderr.isatty() or find_spec("rich") is None:
        yield lambda epoch, sampler: None
        return
    console = import_module("rich.console").Console(stderr=True)
    with import_module("rich.progress").Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show_progress(epoch: int, sampler: Any) -> None:
            text = f"epoch {epoch + 1} of {epochs}"
            progress.update(task, description=text, total=len(sampler.dataset), completed=sampler.done)

        yield show_progress
