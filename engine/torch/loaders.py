"""Loaders of torch for a changing number of ranks."""

from __future__ import annotations

import weakref
from typing import Any

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from ..elastic.samplers import ElasticBatchSampler, ElasticSampler

# What a loader is made of, but for its samplers.
_KEPT = (
    "batch_size num_workers collate_fn pin_memory drop_last timeout worker_init_fn multiprocessing_context generator "
    "prefetch_factor persistent_workers pin_memory_device in_order"
).split()
_CUT = (DistributedSampler, RandomSampler, SequentialSampler)

_made: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # by loader: persistent workers live on


def elastic(loader: DataLoader[Any]) -> tuple[DataLoader[Any], Any]:
    """A loader like one that is given, with a sampler for a changing number of ranks; and that sampler.

    Raises
    ------
    TypeError
        The loader has a sampler of another kind, or none.
    """
    for own in (loader.batch_sampler, loader.sampler):
        if isinstance(own, ElasticSampler | ElasticBatchSampler):
            return loader, own
    if loader not in _made:
        old = loader.sampler
        plain = type(loader.batch_sampler) is BatchSampler and type(old) in _CUT
        if isinstance(loader.dataset, IterableDataset) or not plain:
            kind = type(loader.dataset if isinstance(loader.dataset, IterableDataset) else old).__qualname__
            raise TypeError(
                f"the loader goes by a {kind}, which cannot be cut for a changing number of ranks: make "
                "DataLoader(dataset, sampler=ElasticSampler(dataset)), with a data set that has a length"
            )
        options = {name: getattr(loader, name) for name in _KEPT if hasattr(loader, name)}
        shuffle = old.shuffle if isinstance(old, DistributedSampler) else type(old) is RandomSampler
        sampler = ElasticSampler(loader.dataset, shuffle)  # type: ignore[arg-type]
        _made[loader] = type(loader)(loader.dataset, sampler=sampler, **options)
    made = _made[loader]
    return made, made.sampler
