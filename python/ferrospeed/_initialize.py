"""`initialize`: DeepSpeed's signature and tuple."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any, Callable

import torch

from . import _ferrospeed, comm
from ._data import loader_of
from ._engine import FerrospeedEngine
from ._ferrospeed import FerrospeedError
from ._module import Buffers, Named
from ._optimizer import FerrospeedOptimizer, FerrospeedScheduler, groups_of, section_of


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds `--deepspeed` and `--deepspeed_config` to a program's arguments, as DeepSpeed does."""
    group = parser.add_argument_group("Ferrospeed", "what ferrospeed.initialize(args=...) reads")
    group.add_argument("--deepspeed", default=False, action="store_true", help="read by the program alone")
    group.add_argument("--deepspeed_config", default=None, type=str, help="the path of a ds_config.json")
    group.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", "0")), type=int, help="set by launchers")
    return parser


def _text(args: Any, config: Any, config_params: Any) -> str:
    """The configuration as the engine reads it: text, or the path of a file."""
    if config is not None and config_params is not None:
        raise FerrospeedError("initialize: config and config_params are the same argument; give one")
    given = config if config is not None else config_params
    named = getattr(args, "deepspeed_config", None)
    if given is not None and named is not None:
        raise FerrospeedError("initialize: the configuration is given twice, as config and by --deepspeed_config")
    given = given if given is not None else named
    if given is None:
        raise FerrospeedError("initialize: there is no configuration: give config=, a dictionary or the path of a ds_config.json")
    # The Trainer's object holds a dictionary.
    given = getattr(given, "config", given)
    return json.dumps(given) if isinstance(given, dict) else os.fspath(given)


def initialize(
    args: Any = None,
    model: torch.nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    auto: dict[str, Any] | None = None,
    leaf_modules: list[str] | None = None,
    seed: int = 42,
) -> tuple[FerrospeedEngine, FerrospeedOptimizer | None, Any, Any]:
    """Makes an engine of a torch module. All ranks call it together.

    Arguments and result are DeepSpeed's: the engine, its optimizer, a data loader where ``training_data`` was given, and the
    learning-rate schedule where there is one. In addition, ``auto`` has values for options that the configuration leaves to
    "auto", by path, and ``leaf_modules`` paths of modules whose parameters stage 3 gathers as one.
    """
    if not isinstance(model, torch.nn.Module):
        raise FerrospeedError(f"initialize: model is {type(model).__name__}, and must be a torch.nn.Module")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param), ("distributed_port", distributed_port)):
        if value is not None:
            raise NotImplementedError(f"initialize: {name} is not taken for torch modules")
    if dist_init_required is not False:
        comm.init_distributed()
    named = Named(model)
    if not named.params:
        raise FerrospeedError("initialize: the model has no parameters")
    if callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(model_parameters if model_parameters is not None else model.parameters())
    overrides = []
    if optimizer is not None:
        overrides.append(f"optimizer={section_of(optimizer)}")
        model_parameters = optimizer.param_groups
    groups = groups_of(model_parameters, named)
    if groups is None:
        groups = [(list(range(len(named.params))), None, None, None)]
    trained = _trained(named, groups)
    # What has nothing to train is no group of the engine's.
    kept = [number for number, group in enumerate(groups) if any(trained[index] for index in group[0])]
    asked = [groups[number] for number in kept]
    leaf_modules = (leaf_modules or []) + [name for name, each in model.named_modules() if hasattr(each, "_ferrospeed_leaf")]
    buffers = Buffers(model)
    core = _core(_text(args, config, config_params), named, buffers, asked, trained, overrides, auto, leaf_modules, seed)
    options = core.group_options()
    engine = FerrospeedEngine(core, model, named, buffers, trained)
    made = None
    if options:
        members = [[index for index in group[0] if trained[index]] for group in groups]
        made = FerrospeedOptimizer(core, engine, named, members, kept, optimizer)
    schedule = _schedule(core, lr_scheduler, made)
    engine.adopt(made, schedule, client=lr_scheduler is not None)
    loader = None
    if training_data is not None:
        loader = loader_of(training_data, engine, collate_fn, seed)
        engine.training_dataloader = loader
    return engine, made, loader, schedule


def _trained(named: Named, groups: Any) -> list[bool]:
    members = {index for group in groups for index in group[0]}
    return [param.requires_grad and index in members for index, param in enumerate(named.params)]


def _core(text: str, named: Named, buffers: Buffers, groups: Any, trained: list[bool], overrides: list[str], auto: Any, leaf_modules: Any, seed: int) -> Any:
    """The engine itself, which takes the parameters' values over."""
    kept, given = [], []
    for name, param, trains in zip(named.names, named.params, trained):
        if param.device.type != "cpu":
            raise FerrospeedError(f"initialize: parameter '{name}' is on {param.device}; this engine takes modules on the CPU")
        values = param.detach().contiguous()
        kept.append(values)
        given.append((name, values.data_ptr(), str(values.dtype).removeprefix("torch."), list(values.shape), trains))
    values = [(path, json.dumps(value)) for path, value in (auto or {}).items()]
    # `kept` holds what the engine reads from until it has its own.
    core = _ferrospeed.Engine(text, given, buffers.given(), named.aliases, groups, overrides, values, leaf_modules, seed)
    del kept
    return core


def _schedule(core: Any, given: Any, optimizer: FerrospeedOptimizer | None) -> Any:
    if given is None:
        has_one = json.loads(core.config()).get("scheduler") is not None
        return FerrospeedScheduler(core) if has_one and optimizer is not None else None
    if json.loads(core.config()).get("scheduler") is not None:
        raise FerrospeedError("initialize: there are two schedules, lr_scheduler and the ds_config's; remove one")
    if optimizer is None:
        raise FerrospeedError("initialize: lr_scheduler is given, and there is no optimizer whose rates it could set")
    if callable(given) and not hasattr(given, "step"):
        given = given(optimizer)
    if optimizer is not None:
        optimizer.push()
    return given
