"""A data loader over this rank's samples."""

from __future__ import annotations

from typing import Any, Callable

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data.distributed import DistributedSampler

from . import comm


def loader_of(data: Any, engine: Any, collate_fn: Callable[[list[Any]], Any] | None, seed: int) -> DataLoader:
    """Micro-batches of this rank's samples, in an order that the seed decides; `set_epoch` of its sampler begins another."""
    options: dict[str, Any] = {"batch_size": engine.train_micro_batch_size_per_gpu(), "collate_fn": collate_fn}
    options["drop_last"] = bool(engine.config.get("dataloader_drop_last", False))
    if isinstance(data, IterableDataset):
        return DataLoader(data, **options)
    sampler = DistributedSampler(data, num_replicas=comm.get_world_size(), rank=comm.get_rank(), shuffle=True, seed=seed)
    return DataLoader(data, sampler=sampler, **options)
