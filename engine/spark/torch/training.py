"""Training of a PyTorch model on a rank of an estimator, with its part of a data set, and results in a store."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

from ..manifest import TRAIN, VALIDATION
from ..reader import Batch, Reader
from ..training import START, Training, like_shape, load, reshape_columns

CHECKPOINT = "checkpoint/state.pt"


def train_rank(training: Training) -> list[dict[str, float]]:
    """Train on one rank; return the losses by epoch, averaged over all ranks.

    There is a `val_loss` beside `loss` if there are validation rows.
    """
    import torch

    from ... import torch as hvd

    hvd.init()
    torch.manual_seed(training.seed)
    model, optimizer, losses = load(training.store, f"{training.run}/{START}")
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if torch.cuda.is_available() else None
    if device is not None:
        model.to(device)  # in place, as the optimizer refers to the parameters
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **training.options)
    readers = {split: training.make_reader(split, hvd.rank(), hvd.size()) for split in training.splits}
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
        found = {"loss": _run_pass(training, readers[TRAIN], TRAIN, epoch, model, losses, device, step)}
        if VALIDATION in readers:
            model.eval()
            with torch.no_grad():
                found["val_loss"] = _run_pass(training, readers[VALIDATION], VALIDATION, epoch, model, losses, device)
        history.append(found)
        if hvd.rank() == 0:
            _keep_state(training, model, history)
    hvd.barrier()  # no rank ends before the model is written
    hvd.shutdown()
    return history


def _run_pass(
    training: Training,
    reader: Reader,
    split: str,
    epoch: int,
    model: Any,
    losses: Sequence[tuple[Callable[..., Any], float]],
    device: Any,
    step: Callable[[Any, int, bool], None] = lambda loss, number, last: None,
) -> float:
    """Iterate once over this rank's rows; return the average loss over the rows of all ranks.

    `step` is called with the loss of a batch, the batch's number, and whether it is the last of the epoch.
    """
    import torch

    from ... import torch as hvd

    size, steps = training.plan_batches(reader, split)
    sums = torch.zeros(2, dtype=torch.float64, device="cpu")
    for number, batch in zip(range(steps), reader.read_batches(epoch, size), strict=False):
        outputs = model(*_make_tensors(batch, training.features, training.shapes, device))
        outputs = outputs if isinstance(outputs, tuple | list) else (outputs,)
        labels = [
            like_shape(label, tuple(output.shape)) if shape is None else label
            for label, output, shape in zip(
                _make_tensors(batch, training.labels, training.label_shapes, device),
                outputs,
                training.label_shapes,
                strict=True,
            )
        ]
        loss = sum(
            weight * function(output, label)
            for (function, weight), output, label in zip(losses, outputs, labels, strict=True)
        )
        step(loss, number, number == steps - 1)
        rows = len(batch[training.labels[0]])
        sums += torch.tensor([float(loss.detach()) * rows, rows], dtype=torch.float64, device="cpu")
    total, rows = hvd.allreduce(sums, op=hvd.Sum, name=f"engine.spark.{split}.loss").tolist()
    return float(total / rows)


def _make_tensors(
    batch: Batch, names: Sequence[str], shapes: Sequence[tuple[int, ...] | None], device: Any = None
) -> list[Any]:
    """Return columns of a batch as tensors, each in its shape."""
    import torch

    return [torch.from_numpy(array).to(device) for array in reshape_columns(batch, names, shapes)]


def _keep_state(training: Training, model: Any, history: list[dict[str, float]]) -> None:
    """Write the model's state after an epoch; the model itself has the optimizer's hooks, and is not pickled."""
    import torch

    buffer = io.BytesIO()
    torch.save({name: value.cpu() for name, value in model.state_dict().items()}, buffer)
    training.store.write(f"{training.run}/{CHECKPOINT}", buffer.getvalue())
    training.keep_history(history)
