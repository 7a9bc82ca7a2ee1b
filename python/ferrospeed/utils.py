"""Looking at and changing state that is spread over ranks, by DeepSpeed's names.

What is full is the same on every rank, and all ranks call these together; what is local is this rank's own part, flat. All are
f32.
"""

from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack

from . import _ferrospeed
from .zero import owner_of

__all__ = [
    "safe_get_full_fp32_param", "safe_get_full_grad", "safe_get_full_optimizer_state", "safe_get_local_fp32_param",
    "safe_get_local_grad", "safe_get_local_optimizer_state", "safe_set_full_fp32_param", "safe_set_full_optimizer_state",
    "safe_set_local_fp32_param", "safe_set_local_optimizer_state",
]


def _full(param: torch.Tensor, what: str, call: str) -> torch.Tensor:
    engine, index = owner_of(param, call)
    return from_dlpack(_ferrospeed.get_full(engine._core, index, what))


def _local(param: torch.Tensor, what: str, call: str) -> torch.Tensor:
    engine, index = owner_of(param, call)
    return from_dlpack(_ferrospeed.get_local(engine._core, index, what)[1])


def _set(param: torch.Tensor, value: torch.Tensor, what: str, call: str) -> None:
    engine, index = owner_of(param, call)
    value = value.detach().to(device="cpu", dtype=torch.float32).contiguous()
    put = _ferrospeed.set_local if "local" in call else _ferrospeed.set_full
    put(engine._core, index, what, value.data_ptr(), value.numel())


def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """The f32 weights of a parameter, whole."""
    return _full(param, "weight", "safe_get_full_fp32_param")


def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor:
    """The averaged gradient of a parameter, whole, between the last backward of a step and the step."""
    engine, _ = owner_of(param, "safe_get_full_grad")
    return _full(param, "grad", "safe_get_full_grad") / engine.loss_scale


def safe_get_full_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor:
    """A state of the optimizer, such as "exp_avg", whole."""
    return _full(param, optim_state_key, "safe_get_full_optimizer_state")


def safe_set_full_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces the weights of a parameter by a whole value, the same on every rank."""
    _set(param, value, "weight", "safe_set_full_fp32_param")


def safe_set_full_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces a state of the optimizer by a whole value, the same on every rank."""
    _set(param, value, optim_state_key, "safe_set_full_optimizer_state")


def safe_get_local_fp32_param(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter's f32 weights."""
    return _local(param, "weight", "safe_get_local_fp32_param")


def safe_get_local_grad(param: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter's averaged gradient."""
    engine, _ = owner_of(param, "safe_get_local_grad")
    return _local(param, "grad", "safe_get_local_grad") / engine.loss_scale


def safe_get_local_optimizer_state(param: torch.Tensor, optim_state_key: str) -> torch.Tensor:
    """This rank's part of a state of the optimizer."""
    return _local(param, optim_state_key, "safe_get_local_optimizer_state")


def safe_set_local_fp32_param(param: torch.Tensor, value: torch.Tensor) -> None:
    """Replaces this rank's part of a parameter's weights. All ranks call it together, each with its own part."""
    _set(param, value, "weight", "safe_set_local_fp32_param")


def safe_set_local_optimizer_state(param: torch.Tensor, value: torch.Tensor, optim_state_key: str) -> None:
    """Replaces this rank's part of a state of the optimizer."""
    _set(param, value, optim_state_key, "safe_set_local_optimizer_state")
