"""Weights that are spread over ranks: making them, and looking at them whole."""

from __future__ import annotations

import contextlib
import enum
import weakref
from typing import Any, Iterable

import torch
from torch.utils.dlpack import from_dlpack

from . import _ferrospeed, comm
from ._ferrospeed import FerrospeedError

__all__ = ["GatheredParameters", "Init", "ZeroParamStatus"]


class ZeroParamStatus(enum.Enum):
    """Whether a parameter is whole, by DeepSpeed's names."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


class _ById:
    """Parameters by identity: tensors compare by value."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[Any, Any, int]] = {}

    def note(self, engine: Any, params: Iterable[torch.Tensor]) -> None:
        for index, param in enumerate(params):
            key = id(param)
            if engine.zero_optimization_stage() == 3:
                # Programs ask by these names for what is spread; it is whole for them under GatheredParameters.
                param.ds_status, param.ds_id = ZeroParamStatus.NOT_AVAILABLE, index  # type: ignore[attr-defined]
                param.ds_numel, param.ds_shape = param.numel(), param.shape  # type: ignore[attr-defined]
            gone = weakref.ref(param, lambda _, key=key: self._of.pop(key, None))
            self._of[key] = (gone, weakref.ref(engine), index)

    def find(self, param: torch.Tensor) -> tuple[Any, int] | None:
        found = self._of.get(id(param))
        engine = found[1]() if found is not None else None
        return (engine, found[2]) if found is not None and engine is not None else None


OWNERS = _ById()


def owner_of(param: torch.Tensor, call: str) -> tuple[Any, int]:
    """The engine that has a parameter, and its number there."""
    found = OWNERS.find(param)
    if found is None:
        raise FerrospeedError(f"{call}: a parameter of shape {tuple(param.shape)} is of no engine")
    return found


# Of DeepSpeed's arguments of `Init`, those that say how it divides what is made within, or what `initialize` is told anyway.
_INIT_OPTIONS = {
    "config", "config_dict_or_path", "data_parallel_group", "dtype", "mem_efficient_linear", "mpu", "param_swapper", "pin_memory",
    "sequence_data_parallel_group", "tensor_overrides", "zero_param_parallel_group", "zero_quantized_nontrainable_weights", "zero_quantized_weights",
}


class Init(contextlib.AbstractContextManager):
    """For programs that have it around the making of a module: here a module has its values from when it is made until an engine
    takes them over, within this as outside. So each rank needs room for the module once, in its own type, while it is made.
    """

    def __init__(self, module: Any = None, enabled: bool = True, remote_device: str | None = None, **options: Any) -> None:
        unknown = sorted(set(options) - _INIT_OPTIONS)
        if unknown:
            raise TypeError(f"zero.Init() has no argument '{unknown[0]}'")
        if remote_device not in (None, "none", "cpu"):
            raise NotImplementedError(f"zero.Init: remote_device={remote_device!r} is not taken")

    def __enter__(self) -> "Init":
        return self

    def __exit__(self, *_: Any) -> None:
        return None


class GatheredParameters(contextlib.AbstractContextManager):
    """Parameters whole within, on every rank. With ``modifier_rank``, what that rank writes to them becomes their value.

    All ranks enter and leave it together. Parameters of no engine, and parameters below stage 3 that are only read, are as they
    are.
    """

    def __init__(self, params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True) -> None:
        given = [params] if isinstance(params, torch.Tensor) else list(params)
        self._params = [param for param in given if OWNERS.find(param) is not None] if enabled else []
        self._modifier = modifier_rank

    def __enter__(self) -> "GatheredParameters":
        for param in self._params:
            engine, index = owner_of(param, "GatheredParameters")
            if self._modifier is None and engine.zero_optimization_stage() < 3:
                continue
            # What is written must be written to memory of its own: the engine's may be all ranks' in common.
            whole = from_dlpack(_ferrospeed.get_full(engine._core, index, "weight")).to(param.dtype)
            engine._values.show(index, whole)
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        written = [param.data for param in self._params]
        shown = [owner_of(param, "GatheredParameters") for param in self._params]
        for engine, index in shown:
            engine._values.hide(index)
        if kind is not None or self._modifier is None:
            return
        for (engine, index), value in zip(shown, written):
            value = value.detach().to(torch.float32).contiguous()
            comm.broadcast(value, self._modifier)
            _ferrospeed.set_full(engine._core, index, "weight", value.data_ptr(), value.numel())
