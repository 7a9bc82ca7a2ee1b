"""The optimizer: the engine's own, by the ds_config or by what a torch optimizer says it is."""

from __future__ import annotations

import json
from typing import Any, Iterable

import torch

from ._ferrospeed import Engine as Core
from ._ferrospeed import FerrospeedError
from ._module import Named

# A group as the engine takes it: parameters by number, learning rate, weight decay, decay rates; None is the configuration's.
Group = tuple[list[int], "float | None", "float | None", "list[float] | None"]

# Of torch's optimizers, what of their groups becomes which option, and what must be as it is by default.
_RULES: dict[type, tuple[str, dict[str, str], dict[str, Any]]] = {
    torch.optim.AdamW: ("AdamW", {"eps": "eps", "amsgrad": "amsgrad", "maximize": "maximize"}, {}),
    torch.optim.Adam: ("Adam", {"eps": "eps", "amsgrad": "amsgrad", "maximize": "maximize"}, {}),
    torch.optim.SGD: ("SGD", {"dampening": "dampening", "nesterov": "nesterov", "maximize": "maximize"}, {}),
    torch.optim.Adagrad: ("Adagrad", {"eps": "eps"}, {"lr_decay": 0, "initial_accumulator_value": 0, "maximize": False}),
}


def _betas(group: dict[str, Any]) -> list[float] | None:
    if "betas" in group:
        return [float(beta) for beta in group["betas"]]
    return [float(group["momentum"]), 0.0] if "momentum" in group else None


def section_of(optimizer: torch.optim.Optimizer) -> str:
    """A torch optimizer as the section `optimizer` of a ds_config."""
    rule = _RULES.get(getattr(optimizer, "ferrospeed_rule", type(optimizer)))
    if rule is None:
        known = ", ".join(f"torch.optim.{kind.__name__}" for kind in _RULES)
        raise FerrospeedError(
            f"an optimizer of type {type(optimizer).__module__}.{type(optimizer).__qualname__} is not known here; give one of "
            f"{known}, or name one in the ds_config"
        )
    name, options, defaults = rule
    first = optimizer.param_groups[0]
    params: dict[str, Any] = {"lr": float(first["lr"]), "weight_decay": float(first["weight_decay"])}
    betas = _betas(first)
    if name == "SGD":
        params["momentum"] = betas[0] if betas else 0.0
    elif betas:
        params["betas"] = betas
    if name == "Adam":
        # torch's Adam lets weights decay through the gradient; the ds_config's default is the other one.
        params["adam_w_mode"] = bool(first.get("decoupled_weight_decay", False))
    for theirs, ours in options.items():
        values = {group.get(theirs, optimizer.defaults.get(theirs)) for group in optimizer.param_groups}
        if len(values) > 1:
            raise FerrospeedError(f"{theirs} differs between parameter groups ({sorted(values)}); it is one for all here")
        params[ours] = values.pop()
    for option, default in defaults.items():
        if any(group.get(option, default) != default for group in optimizer.param_groups):
            raise FerrospeedError(f"{type(optimizer).__name__} with another {option} than {default} is not known here")
    return json.dumps({"type": name, "params": params})


def groups_of(given: Iterable[Any] | None, named: Named) -> list[Group] | None:
    """Parameters, or groups of them as torch's optimizers take, as the engine takes them."""
    if given is None:
        return None
    items = list(given)
    if items and not isinstance(items[0], dict):
        items = [{"params": items}]
    groups: list[Group] = []
    for item in items:
        params = item["params"]
        params = [params] if isinstance(params, torch.Tensor) else list(params)
        # torch takes (name, parameter), too.
        params = [param[1] if isinstance(param, tuple) else param for param in params]
        members = [named.index(param) for param in params]
        lr, decay = item.get("lr"), item.get("weight_decay")
        groups.append((members, None if lr is None else float(lr), None if decay is None else float(decay), _betas(item)))
    return groups


class FerrospeedOptimizer(torch.optim.Optimizer):
    """What `initialize` gives as the optimizer: its groups are the engine's, and whoever changes a rate there changes it here.

    The engine steps; `step()` of this is `engine.step()`.
    """

    def __init__(
        self, core: Core, engine: Any, named: Named, groups: list[list[int]], kept: list[int], client: torch.optim.Optimizer | None
    ) -> None:
        self._core, self._engine, self._kept = core, engine, kept
        if client is None:
            made = [{"params": [named.params[index] for index in group]} for group in groups]
            super().__init__(made, {"lr": 0.0, "weight_decay": 0.0, "betas": (0.0, 0.0)})
        else:
            # Schedulers of the program's hold its own optimizer: its groups are those that count.
            super().__init__(client.param_groups, dict(client.defaults))
            self.param_groups = client.param_groups
        self.pull()

    def _groups(self) -> list[tuple[int, dict[str, Any], tuple[float, float, list[float]]]]:
        """The groups that the engine trains, by its numbers, with its options: those without parameters it does not know."""
        known = self._core.group_options()
        return [(number, self.param_groups[at], options) for number, (at, options) in enumerate(zip(self._kept, known))]

    def pull(self) -> None:
        """Takes the engine's rates over into the groups."""
        for _, group, (lr, weight_decay, betas) in self._groups():
            group["lr"], group["weight_decay"] = lr, weight_decay
            if "momentum" in group:
                group["momentum"] = betas[0]
            elif "betas" in group:
                group["betas"] = tuple(betas)

    def push(self) -> None:
        """Gives the groups' rates to the engine."""
        for index, group, known in self._groups():
            betas = _betas(group) or list(known[2])
            new = (float(group["lr"]), float(group["weight_decay"]), betas)
            if new != (known[0], known[1], list(known[2])):
                self._core.set_group_options(index, *new)

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by; 1 outside fp16."""
        return self._core.loss_scale()

    cur_scale = loss_scale

    @property
    def overflow(self) -> bool:
        """Whether the last step was skipped because a gradient was not a number."""
        return self._engine.last_step_skipped

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """As `engine.step()`."""
        if closure is not None:
            raise FerrospeedError("step(closure): the engine takes no closure; call engine.backward(loss) and engine.step()")
        self._engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that wait for a step."""
        self._engine.zero_grad()

    def backward(self, loss: torch.Tensor, **options: Any) -> Any:
        """As `engine.backward()`."""
        return self._engine.backward(loss, **options)

    def state_dict(self) -> Any:
        """Not here: states are spread over ranks."""
        raise NotImplementedError("optimizer.state_dict(): states are spread over ranks; use engine.save_checkpoint(folder)")

    def load_state_dict(self, state_dict: Any) -> None:
        """Not here: states are spread over ranks."""
        raise NotImplementedError("optimizer.load_state_dict(): states are spread over ranks; use engine.load_checkpoint(folder)")


class FerrospeedScheduler:
    """The schedule of the ds_config, which the engine steps."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def get_last_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [options[0] for options in self._core.group_options()]

    get_lr = get_last_lr

    def step(self, *_: Any) -> None:
        """Refused: the engine steps it when weights were updated."""
        raise FerrospeedError("lr_scheduler.step(): the engine steps the ds_config's schedule; drop this call")

    def state_dict(self) -> dict[str, Any]:
        """Empty: the engine's checkpoints have it."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes nothing: the engine's checkpoints have it."""
        if state_dict:
            raise FerrospeedError("lr_scheduler.load_state_dict(): the engine's checkpoints have the schedule; load one")
