"""What the ranks of an estimator do: train a model of PyTorch on their parts of a data set, and keep it in a store."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..manifest import TRAIN, VALIDATION, Manifest
from ..reader import Batch, Reader
from ..store import Store

START, CHECKPOINT, MODEL, HISTORY = "start.pkl", "checkpoint/state.pt", "model.pkl", "history.json"


@dataclass(frozen=True)
class Training:
    """What every rank is told.

    Attributes
    ----------
    store : Store
    run : str
        Of the run, below the store: the model is read and written there.
    data : str
        Of the data set, below the store.
    manifest : Manifest
    features, labels : tuple of str
    shapes : tuple of tuple of int, or None
        Of each feature, without the rows; None: as the data has it.
    batch_size, val_batch_size, epochs : int
    steps, val_steps : int or None
        The most batches of an epoch.
    shuffle : bool
    seed : int
    options : mapping
        More arguments of `engine.torch.DistributedOptimizer`, `backward_passes_per_step` among them.
    verbose : int
    """

    store: Store
    run: str
    data: str
    manifest: Manifest
    features: tuple[str, ...]
    labels: tuple[str, ...]
    shapes: tuple[tuple[int, ...] | None, ...]
    batch_size: int
    val_batch_size: int
    epochs: int
    steps: int | None
    val_steps: int | None
    shuffle: bool
    seed: int
    options: Mapping[str, Any]
    verbose: int


def load(store: Store, path: str) -> Any:
    """Read a pickle of a store. That runs code: the store must be one that only trusted users write to."""
    import pickle

    return pickle.loads(store.read(path))


def dump(store: Store, path: str, value: Any) -> None:
    """Write a pickle into a store, of classes of a notebook, too."""
    from pyspark import cloudpickle

    buffer = io.BytesIO()
    cloudpickle.dump(value, buffer)
    store.write(path, buffer.getvalue())


def train(training: Training) -> list[dict[str, float]]:
    """Train on one rank.

    Returns
    -------
    list of dict of str to float
        By epoch: `loss`, and `val_loss` if rows validate, averaged over all ranks.
    """
    import torch

    from ... import torch as hvd

    hvd.init()
    torch.manual_seed(training.seed)
    model, optimizer, losses = load(training.store, f"{training.run}/{START}")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else None
    if device is not None:
        model.to(device)  # keeps the parameters, which the optimizer has
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **training.options)
    readers = {split: _reader(training, split, hvd.rank(), hvd.size()) for split in _splits(training)}
    passes = training.options["backward_passes_per_step"]

    def step(loss: Any, number: int, last: bool) -> None:
        if number % passes == 0:
            optimizer.zero_grad()
        loss.backward()
        if number % passes == passes - 1 or last:
            optimizer.step()

    history = []
    for epoch in range(training.epochs):
        model.train()
        found = {"loss": _pass(training, readers[TRAIN], TRAIN, epoch, model, losses, device, step)}
        if VALIDATION in readers:
            model.eval()
            with torch.no_grad():
                found["val_loss"] = _pass(training, readers[VALIDATION], VALIDATION, epoch, model, losses, device)
        history.append(found)
        if hvd.rank() == 0:
            _keep(training, model, history)
    hvd.barrier()  # the model is there when the first rank ends
    hvd.shutdown()
    return history


def _splits(training: Training) -> list[str]:
    return [split for split in (TRAIN, VALIDATION) if split == TRAIN or training.manifest.rows(split)]


def _reader(training: Training, split: str, rank: int, size: int) -> Reader:
    return Reader(
        training.store,
        training.data,
        training.manifest,
        [*training.features, *training.labels],
        split,
        rank=rank,
        size=size,
        seed=training.seed,
        shuffle=training.shuffle and split == TRAIN,
    )


def _pass(
    training: Training,
    reader: Reader,
    split: str,
    epoch: int,
    model: Any,
    losses: Sequence[tuple[Callable[..., Any], float]],
    device: Any,
    step: Callable[[Any, int, bool], None] = lambda loss, number, last: None,
) -> float:
    """Go once through this rank's rows; the average loss of the rows of all ranks.

    `step` is called with the loss of a batch, the batch's number, and whether it is the last of the epoch.
    """
    import torch

    from ... import torch as hvd

    size, most = (
        (training.batch_size, training.steps) if split == TRAIN else (training.val_batch_size, training.val_steps)
    )
    steps = reader.steps(size) if most is None else min(most, reader.steps(size))
    sums = torch.zeros(2, dtype=torch.float64)
    for number, batch in zip(range(steps), reader.batches(epoch, size), strict=False):
        outputs = model(*inputs_of(batch, training.features, training.shapes, device))
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        labels = inputs_of(batch, training.labels, (None,) * len(training.labels), device)
        loss = sum(
            weight * function(output.reshape(label.shape) if output.numel() == label.numel() else output, label)
            for (function, weight), output, label in zip(losses, outputs, labels, strict=True)
        )
        step(loss, number, number == steps - 1)
        rows = len(batch[training.labels[0]])
        sums += torch.tensor([float(loss.detach()) * rows, rows], dtype=torch.float64)
    total, rows = hvd.allreduce(sums, op=hvd.Sum, name=f"engine.spark.{split}.loss").tolist()
    return float(total / rows)


def inputs_of(
    batch: Batch, names: Sequence[str], shapes: Sequence[tuple[int, ...] | None], device: Any = None
) -> list[Any]:
    """Columns of a batch as tensors.

    Parameters
    ----------
    batch : dict of str to numpy.ndarray
    names : sequence of str
    shapes : sequence of tuple of int, or None
        Of each without the rows; None: as it is.
    device : torch.device, optional

    Returns
    -------
    list of torch.Tensor
    """
    import torch

    found = []
    for name, shape in zip(names, shapes, strict=True):
        tensor = torch.from_numpy(batch[name].copy())
        found.append((tensor if shape is None else tensor.reshape(len(tensor), *shape)).to(device))
    return found


def _keep(training: Training, model: Any, history: list[dict[str, float]]) -> None:
    """Write the model's state as it is after an epoch; the model itself has the optimizer's hooks by now."""
    import torch

    buffer = io.BytesIO()
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, buffer)
    training.store.write(f"{training.run}/{CHECKPOINT}", buffer.getvalue())
    training.store.write(f"{training.run}/{HISTORY}", json.dumps(history).encode())
    if training.verbose:
        epoch = len(history)
        said = ", ".join(f"{name} {value:.6g}" for name, value in history[-1].items())
        print(f"epoch {epoch} of {training.epochs}: {said}", flush=True)
