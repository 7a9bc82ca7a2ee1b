"""A stand-in for the module `deepspeed`, so that a script runs unchanged: ``python -m ferrospeed.as_deepspeed script.py``.

It has what transformers' Trainer, Accelerate, TRL and PEFT import and call. What is not there raises at import or call, with its
name. A script of one's own may call :func:`install` before it imports any of them.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.metadata
import logging
import os
import runpy
import sys
from types import ModuleType
from typing import Any, Callable, Iterator

# The version whose names and signatures these are.
VERSION = "0.19.8"

_METADATA = f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {VERSION}\nSummary: ferrospeed's stand-in\n"


class _Distribution(importlib.metadata.Distribution):
    """What `importlib.metadata` says of the stand-in."""

    def read_text(self, filename: str) -> str | None:
        return _METADATA if filename in ("METADATA", "PKG-INFO") else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{path}: ferrospeed's stand-in for deepspeed has no files")


class _Module(ModuleType):
    """A module of the stand-in: what it has not got, it says by name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        below = f"{self.__name__}.{name}"
        if below in _MODULES:
            return importlib.import_module(below)
        raise AttributeError(f"ferrospeed's stand-in for deepspeed has no '{below}'")


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `deepspeed` and what is below it here, and nowhere else."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] != "deepspeed":
            return None
        if fullname not in _MODULES:
            raise ModuleNotFoundError(f"ferrospeed's stand-in for deepspeed has no module '{fullname}'", name=fullname)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def find_distributions(self, context: Any = importlib.metadata.DistributionFinder.Context()) -> Iterator[Any]:
        return iter([_Distribution()] if context.name in (None, "deepspeed") else [])

    def create_module(self, spec: Any) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__.update(_MODULES[module.__name__]())


def _root() -> dict[str, Any]:
    import ferrospeed
    from ferrospeed._engine import FerrospeedEngine

    return {
        "__version__": VERSION,
        "__git_hash__": None,
        "__git_branch__": None,
        "DeepSpeedEngine": FerrospeedEngine,
        "FerrospeedStandIn": True,
        "add_config_arguments": ferrospeed.add_config_arguments,
        "init_distributed": _init_distributed,
        "initialize": ferrospeed.initialize,
    }


def _init_distributed(dist_backend: str | None = None, *positional: Any, **options: Any) -> None:
    """Meets the other ranks, and lets torch.distributed meet, too, since scripts of the Trainer's use it beside."""
    import ferrospeed
    import torch

    if positional:
        raise TypeError("init_distributed(): give arguments by name")
    known = {name: options[name] for name in ("rank", "world_size") if name in options}
    _tell_accelerate()
    ferrospeed.init_distributed(None, **known)
    if torch.distributed.is_available() and not torch.distributed.is_initialized() and "RANK" in os.environ:
        import datetime

        port = [_free_port() if ferrospeed.comm.get_rank() == 0 else None]
        ferrospeed.comm.broadcast_object_list(port)
        address = os.environ.get("MASTER_ADDR", "127.0.0.1")
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"tcp://{address}:{port[0]}",
            rank=ferrospeed.comm.get_rank(),
            world_size=ferrospeed.comm.get_world_size(),
            timeout=options.get("timeout") or datetime.timedelta(minutes=30),
        )


def _tell_accelerate() -> None:
    """Accelerate, which asks for this, believes in ranks without GPUs only where it knows how they talk."""
    state = sys.modules.get("accelerate.state")
    shared = state.PartialState._shared_state if state is not None else {}
    if "RANK" in os.environ and "backend" in shared and shared["backend"] is None:
        shared["backend"] = "gloo"


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("", 0))
        return probe.getsockname()[1]


def _comm() -> dict[str, Any]:
    from ferrospeed import comm

    return {name: getattr(comm, name) for name in comm.__all__} | {"init_distributed": _init_distributed}


def _zero() -> dict[str, Any]:
    from ferrospeed import zero

    return {"Init": zero.Init, "GatheredParameters": zero.GatheredParameters}


def _partition_parameters() -> dict[str, Any]:
    import torch

    from ferrospeed.zero import ZeroParamStatus

    def constructor(fn: Callable[..., Any], *_: Any, **__: Any) -> Callable[..., Any]:
        # `zero.Init` changes no constructor of tensors here.
        return fn

    return _zero() | {
        "ZeroParamStatus": ZeroParamStatus,
        "_orig_torch_arange": torch.arange,
        "zero_wrapper_for_fp_tensor_constructor": constructor,
    }


def _utils() -> dict[str, Any]:
    from ferrospeed import utils

    logger = logging.getLogger("DeepSpeed")
    return {name: getattr(utils, name) for name in utils.__all__} | {"logger": logger, "set_z3_leaf_modules": _set_leaf_modules}


def _set_leaf_modules(model: Any, leaf_module_classes: list[Any]) -> list[Any]:
    """Marks modules whose parameters stage 3 gathers as one: `initialize` reads the mark."""
    names = {kind if isinstance(kind, str) else kind.__name__ for kind in leaf_module_classes}
    found = [module for module in model.modules() if type(module).__name__ in names]
    if not found:
        raise ValueError(f"set_z3_leaf_modules: the model has no module of {sorted(names)}")
    for module in found:
        module._ferrospeed_leaf = True
    return found


def _engine() -> dict[str, Any]:
    from ferrospeed._engine import FerrospeedEngine

    return {"DeepSpeedEngine": FerrospeedEngine}


def _schedules() -> dict[str, Any]:
    names = ["LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"]
    return {"VALID_LR_SCHEDULES": names}


@functools.cache
def _stand_in_adam(name: str) -> type:
    """An Adam of DeepSpeed's, which is a torch optimizer here: it says what the engine is to do, and never steps itself."""
    import torch

    class Adam(torch.optim.AdamW):
        def __init__(self, params: Any, lr: float = 1e-3, bias_correction: bool = True, betas: Any = (0.9, 0.999), eps: float = 1e-8,
                     weight_decay: float = 0.0, amsgrad: bool = False, adamw_mode: bool = True, adam_w_mode: bool = True,
                     fp32_optimizer_states: bool = True, set_grad_none: bool = True) -> None:
            if not bias_correction or not fp32_optimizer_states:
                raise NotImplementedError(f"{name}: bias_correction=False and fp32_optimizer_states=False are not taken")
            super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)
            self.ferrospeed_rule = torch.optim.AdamW if adamw_mode and adam_w_mode else torch.optim.Adam

    Adam.__name__ = Adam.__qualname__ = name
    return Adam


def _adam() -> dict[str, Any]:
    return {name: _stand_in_adam(name) for name in ("DeepSpeedCPUAdam", "FusedAdam")}


class _Accelerator:
    """Where a rank computes: the processor."""

    _name = "cpu"

    def device_name(self, device_index: int | None = None) -> str:
        return "cpu"

    def current_device_name(self) -> str:
        return "cpu"

    def current_device(self) -> str:
        return "cpu"

    def communication_backend_name(self) -> str:
        return "gloo"

    def is_available(self) -> bool:
        return True

    def device_count(self) -> int:
        return 1

    def empty_cache(self) -> None:
        """The engine's memory is its own; torch keeps none for the processor."""

    def is_bf16_supported(self) -> bool:
        return True

    def is_fp16_supported(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"ferrospeed's stand-in for deepspeed has no 'accelerator.{name}'")


def _accelerator() -> dict[str, Any]:
    accelerator = _Accelerator()
    return {"get_accelerator": lambda: accelerator}


def _clone(item: Any, device: Any = "cpu") -> Any:
    """Tensors of a state dictionary as ones of their own: views of a flat buffer would be saved with all of it."""
    import torch

    if isinstance(item, torch.Tensor):
        return item.detach().to(device).clone()
    if isinstance(item, dict):
        return type(item)((key, _clone(value, device)) for key, value in item.items())
    if isinstance(item, (list, tuple)):
        return type(item)(_clone(value, device) for value in item)
    return item


_MODULES: dict[str, Callable[[], dict[str, Any]]] = {
    "deepspeed": _root,
    "deepspeed.accelerator": _accelerator,
    "deepspeed.checkpoint": dict,
    "deepspeed.checkpoint.utils": lambda: {"clone_tensors_for_torch_save": _clone},
    "deepspeed.comm": _comm,
    "deepspeed.ops": dict,
    "deepspeed.ops.adam": _adam,
    "deepspeed.runtime": dict,
    "deepspeed.runtime.engine": _engine,
    "deepspeed.runtime.lr_schedules": _schedules,
    "deepspeed.runtime.zero": _zero,
    "deepspeed.runtime.zero.partition_parameters": _partition_parameters,
    "deepspeed.utils": _utils,
    "deepspeed.zero": _zero,
}


def install() -> None:
    """Puts the stand-in in place of `deepspeed`, which must not have been imported. A second call changes nothing."""
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "deepspeed" in sys.modules:
        raise ImportError("deepspeed itself is imported already: install the stand-in before anything that imports it")
    sys.meta_path.insert(0, _Finder())


def main() -> None:
    """Runs a script with the stand-in in place."""
    if len(sys.argv) < 2:
        raise SystemExit("usage: python -m ferrospeed.as_deepspeed SCRIPT.py [ARGUMENTS...]  (or -m MODULE [ARGUMENTS...])")
    install()
    # The finder's functions are those of this file under its own name, whichever way it was started.
    if sys.argv[1] == "-m":
        del sys.argv[:2]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    from ferrospeed.as_deepspeed import main as run

    run()
