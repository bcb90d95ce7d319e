"""Data loaders of torch for a changing number of ranks."""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..elastic.samplers import ElasticBatchSampler, ElasticSampler
from ..elastic.sampling import DROP, PAD

# Arguments of a loader, except for its samplers.
_KEPT = (
    "num_workers collate_fn pin_memory timeout worker_init_fn multiprocessing_context generator prefetch_factor "
    "persistent_workers pin_memory_device in_order"
).split()

_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by original, so as to keep their workers


def make_elastic(loader: DataLoader[Any]) -> tuple[DataLoader[Any], Any, int]:
    """Return a loader like the given one with a sampler for a changing number of ranks, that sampler, and a batch size.

    The batch size is the number of a rank's samples in a step; 1 if the sampler returns batches. Raises TypeError if
    the loader has a sampler of another kind, or none.
    """
    batches: Any = loader.batch_sampler
    if isinstance(batches, ElasticBatchSampler):
        return loader, batches, 1
    own = _goes_by(loader)
    size: Any = 1 if batches is None else getattr(batches, "batch_size", None)
    if isinstance(own, ElasticSampler) and size is not None:
        return loader, own, size
    if odd := _find_unsupported_part(loader):
        raise TypeError(
            f"the loader goes by {odd}, which cannot be cut for a changing number of ranks: make "
            "DataLoader(dataset, sampler=ElasticSampler(dataset)), with a data set that has a length"
        )
    if loader not in _made:
        options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        cut = {"sampler": _sampler_like(own, loader.dataset), "batch_size": size, "drop_last": batches.drop_last}
        _made[loader] = type(loader)(loader.dataset, **cut, **options)
    made = _made[loader]
    return made, made.sampler, size


def _goes_by(loader: DataLoader[Any]) -> Any:
    """Return the sampler that a loader uses: that of its batch sampler, if it has one."""
    return loader.sampler if loader.batch_sampler is None else getattr(loader.batch_sampler, "sampler", None)


def _find_unsupported_part(loader: DataLoader[Any]) -> str:
    """Describe the part of a loader that does not yield each sample exactly once; empty if there is none."""
    own, batches, data = _goes_by(loader), loader.batch_sampler, cast(Any, loader.dataset)
    if isinstance(data, IterableDataset):
        return f"a {type(data).__qualname__}"
    if batches is not None and type(batches) is not BatchSampler:
        return f"a {type(batches).__qualname__}"
    if batches is None or type(own) not in (DistributedSampler, RandomSampler, SequentialSampler):
        return f"a {type(own).__qualname__}" + " without batches" * (batches is None)
    if type(own) is RandomSampler and own.replacement:
        return "a RandomSampler with replacement"
    source: Any = own.dataset if type(own) is DistributedSampler else own.data_source
    samples, length = own.num_samples if type(own) is RandomSampler else len(source), len(data)
    return "" if samples == length else f"a {type(own).__qualname__} of {samples} of {length} samples"


def _sampler_like(old: Any, dataset: Any) -> ElasticSampler:
    """Make a sampler of the same samples for a changing number of ranks."""
    if type(old) is DistributedSampler:
        return ElasticSampler(dataset, old.shuffle, old.seed, DROP if old.drop_last else PAD)
    return ElasticSampler(dataset, shuffle=type(old) is RandomSampler)
