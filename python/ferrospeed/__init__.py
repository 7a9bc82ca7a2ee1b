"""Ferrospeed: train torch modules larger than one device, on an engine in Rust.

What DeepSpeed's users call has the same names here::

    engine, optimizer, loader, scheduler = ferrospeed.initialize(model=module, config="ds_config.json")
    loss = engine(batch)
    engine.backward(loss)
    engine.step()

torch is imported when something needs it. See docs/python.md.
"""

from __future__ import annotations

import importlib
from typing import Any

from ._ferrospeed import CheckpointError, CommError, ConfigError, FerrospeedError, __version__
from . import comm
from .comm import init_distributed

# What needs torch, and where it is.
_LAZY = {
    "initialize": "_initialize",
    "add_config_arguments": "_initialize",
    "FerrospeedEngine": "_engine",
    "as_deepspeed": "as_deepspeed",
    "zero": "zero",
    "utils": "utils",
}

# What DeepSpeed has and this package does not, by the name under which it would be asked for.
_ABSENT = {
    "init_inference": "generate with `ferrospeed serve` or `ferrospeed generate` from a Hugging Face directory",
    "PipelineModule": "pipeline stages of torch modules are not there; native models have them (docs/pipeline.md)",
    "moe": "mixtures of experts of torch modules are not there; native models have them (docs/experts.md)",
    "checkpointing": "use torch.utils.checkpoint, which works in every stage",
    "tp_model_init": "tensor parallelism of torch modules is not there; native models have it (docs/tensor-parallel.md)",
}

__all__ = [
    "CheckpointError",
    "CommError",
    "ConfigError",
    "FerrospeedEngine",
    "FerrospeedError",
    "__version__",
    "as_deepspeed",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "install_as_deepspeed",
    "utils",
    "zero",
]


def install_as_deepspeed() -> None:
    """Puts a stand-in for `deepspeed` in place, before anything imports it: see :mod:`ferrospeed.as_deepspeed`."""
    from . import as_deepspeed

    as_deepspeed.install()


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        module = importlib.import_module(f".{_LAZY[name]}", __name__)
        return module if _LAZY[name] == name else getattr(module, name)
    if name in _ABSENT:
        raise AttributeError(f"ferrospeed has no '{name}': {_ABSENT[name]}")
    raise AttributeError(f"module 'ferrospeed' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
