"""A module's parameters as views of the engine's memory, and its gradients on their way there.

Below stage 3 a parameter looks at the engine's values all the time (`Lasting`). In stage 3 it does so only while it is needed
(`Coming`): a module's parameters come before its forward and go after it, and what autograd saves of them for backward is a
handle, not a value, that becomes whole again when the operation's backward asks for it. So weights come and go one operation
at a time in backward, whatever the modules look like, tied weights, submodules used twice and recomputation included.
"""

from __future__ import annotations

from typing import Any, Callable, Iterator

import torch
from torch.utils.dlpack import from_dlpack

from ._ferrospeed import Engine as Core
from ._ferrospeed import FerrospeedError
from .zero import ZeroParamStatus

_TYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Named:
    """The parameters of a module, each once, in order, with the other names of tied ones."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.names: list[str] = []
        self.params: list[torch.nn.Parameter] = []
        self.aliases: dict[str, str] = {}
        self._index: dict[int, int] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            known = self._index.get(id(param))
            if known is not None:
                self.aliases[name] = self.names[known]
                continue
            self._index[id(param)] = len(self.params)
            self.names.append(name)
            self.params.append(param)

    def index(self, param: torch.Tensor) -> int:
        """A parameter's number."""
        found = self._index.get(id(param))
        if found is None:
            raise FerrospeedError(f"a parameter of shape {tuple(param.shape)} is not of the module that the engine trains")
        return found

    def __contains__(self, param: object) -> bool:
        return id(param) in self._index

    def of(self, module: torch.nn.Module) -> Iterator[int]:
        """The numbers of a module's own parameters."""
        for param in module._parameters.values():
            if param is not None and id(param) in self._index:
                yield self._index[id(param)]


class Buffers:
    """What a module keeps besides parameters, as the engine saves it: copies in f32, which are made and given back around files."""

    # Whole numbers beyond this are not all there in f32.
    EXACT = 2**24

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self.names = [name for name, _ in module.named_buffers() if self._is_saved(name)]
        self._copies = {name: self._of(name).detach().float().contiguous().clone() for name in self.names}

    def _is_saved(self, name: str) -> bool:
        path, _, last = name.rpartition(".")
        return last not in self._module.get_submodule(path)._non_persistent_buffers_set

    def _of(self, name: str) -> torch.Tensor:
        path, _, last = name.rpartition(".")
        return self._module.get_submodule(path)._buffers[last]

    def now(self) -> dict[str, torch.Tensor]:
        """What the module has."""
        return {name: self._of(name) for name in self.names}

    def given(self) -> list[tuple[str, int, int, torch.Tensor]]:
        """Where the copies are, for the engine."""
        return [(name, copy.data_ptr(), copy.numel(), copy) for name, copy in self._copies.items()]

    def lay_down(self) -> None:
        """Copies what the module has, before a save."""
        for name, copy in self._copies.items():
            now = self._of(name)
            if not now.is_floating_point() and now.numel() and now.long().abs().max() >= self.EXACT:
                raise FerrospeedError(f"buffer '{name}' holds whole numbers from {self.EXACT} on, which checkpoints do not keep exactly")
            copy.copy_(now)

    def give_back(self) -> None:
        """Gives the module what was loaded."""
        with torch.no_grad():
            for name, copy in self._copies.items():
                self._of(name).copy_(copy)


class Gradients:
    """Hooks that give each gradient to the engine the moment autograd has made it."""

    def __init__(self, core: Core, named: Named, trained: list[bool], begin: Callable[[], None]) -> None:
        self._core = core
        self._dtype = _TYPES[core.dtype()]
        self._begin = begin
        self.handles = []
        for index, param in enumerate(named.params):
            if trained[index]:
                self.handles.append(param.register_post_accumulate_grad_hook(self._hook(index, core.dtype())))

    def _hook(self, index: int, name: str) -> Callable[[torch.Tensor], None]:
        def hook(param: torch.Tensor) -> None:
            gradient, param.grad = param.grad, None
            if gradient is None:
                return
            self._begin()
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            gradient = gradient.detach().to(self._dtype).contiguous()
            self._core.push_grad(index, gradient.data_ptr(), name, gradient)

        return hook


class Lasting:
    """Values that stay where they are: stages 0 to 2."""

    def __init__(self, core: Core, named: Named) -> None:
        for index, param in enumerate(named.params):
            param.data = from_dlpack(core.lasting(index))

        self._named = named
        self._before: dict[int, torch.Tensor] = {}

    def attach(self, module: torch.nn.Module) -> None:
        """Nothing is needed before or after a module."""

    def show(self, index: int, value: torch.Tensor) -> None:
        """Lets a program write to a copy."""
        param = self._named.params[index]
        self._before.setdefault(index, param.data)
        param.data = value

    def hide(self, index: int) -> None:
        """Ends that."""
        before = self._before.pop(index, None)
        if before is not None:
            self._named.params[index].data = before

    def end(self) -> None:
        """Nothing is held."""


class Coming:
    """Values that come and go: stage 3."""

    def __init__(self, core: Core, named: Named) -> None:
        self._core = core
        self._named = named
        self._users = [0] * len(named.params)
        # Which parameter the memory at an address is of, while it is whole.
        self._at: dict[int, int] = {}
        # Of each module that runs, the parameters of other modules that it has asked for.
        self._running: list[list[int]] = []
        dtype = _TYPES[core.dtype()]
        # Where there is no value a reader finds what is no number, and a writer an error of torch's; the shape stays.
        nothing = torch.full((1,), float("nan"), dtype=dtype)
        self._absent = [nothing.expand(param.shape) for param in named.params]
        # Values of their own that a program looks at for a while, in place of nothing.
        self._shown: dict[int, torch.Tensor] = {}
        for param, absent in zip(named.params, self._absent):
            param.data = absent

    def attach(self, module: torch.nn.Module) -> None:
        """Hooks on every module, and on who reads the parameters of another."""
        for each in module.modules():
            own = list(self._named.of(each))
            if own:
                each.__dict__["_parameters"] = _Asked(each._parameters, self)
            each.register_forward_pre_hook(self._before(own), prepend=True)
            each.register_forward_hook(self._after(own), always_call=True)
            each.register_state_dict_pre_hook(self._before_state_dict(own))

    def take(self, index: int) -> None:
        """Makes a parameter whole for one more user."""
        if self._users[index] == 0:
            value = from_dlpack(self._core.read(index))
            self._named.params[index].data = value
            if value.numel():
                self._at[value.data_ptr()] = index
        self._users[index] += 1

    def drop(self, index: int) -> None:
        """Lets it go, after the last."""
        self._users[index] -= 1
        if self._users[index] == 0:
            param = self._named.params[index]
            self._at.pop(param.data_ptr(), None)
            param.data = self._shown.get(index, self._absent[index])

    def show(self, index: int, value: torch.Tensor) -> None:
        """Lets a program see a value where there is none between passes."""
        self._shown[index] = value
        if self._users[index] == 0:
            self._named.params[index].data = value

    def hide(self, index: int) -> None:
        """Ends that."""
        self._shown.pop(index, None)
        if self._users[index] == 0:
            self._named.params[index].data = self._absent[index]

    def _before_state_dict(self, own: list[int]) -> Callable[..., None]:
        def before(module: torch.nn.Module, prefix: str, keep_vars: bool) -> None:
            absent = [index for index in own if self._users[index] == 0 and index not in self._shown]
            if absent:
                raise FerrospeedError(
                    f"state_dict(): in stage 3 '{self._named.names[absent[0]]}' is spread over ranks; call it within "
                    "zero.GatheredParameters(module.parameters()), or use engine.save_16bit_model or save_checkpoint"
                )

        return before

    def end(self) -> None:
        """Lets go of all that a pass that failed has left."""
        self._running.clear()
        for index, users in enumerate(self._users):
            if users:
                self._users[index] = 1
                self.drop(index)

    def asked(self, param: torch.Tensor) -> None:
        """A module that runs reads a parameter that may be of another."""
        if not self._running or param not in self._named:
            return
        index = self._named.index(param)
        if self._users[index] == 0:
            self.take(index)
            self._running[-1].append(index)

    def _before(self, own: list[int]) -> Callable[..., None]:
        def before(module: torch.nn.Module, inputs: Any) -> None:
            outer = torch._C._autograd._top_saved_tensors_default_hooks(True)
            pack, unpack = self._saving(outer)
            torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)
            self._running.append([])
            for index in own:
                self.take(index)

        return before

    def _after(self, own: list[int]) -> Callable[..., None]:
        def after(module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
            if not self._running:
                return
            for index in own + self._running.pop():
                if self._users[index]:
                    self.drop(index)
            torch._C._autograd._pop_saved_tensors_default_hooks()

        return after

    def _saving(self, outer: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """How tensors are saved for backward: of weights a handle, all else as whoever is outside would save it."""
        core, at = self._core, self._at
        if outer is not None and getattr(outer[0], "values", None) is self:
            # A module around this one has put them there.
            return outer
        outer_pack, outer_unpack = outer if outer is not None else (_kept, _given_back)

        def pack(tensor: torch.Tensor) -> Any:
            storage = tensor.untyped_storage()
            index = at.get(storage.data_ptr()) if storage.nbytes() else None
            if index is None:
                return (None, outer_pack(tensor))
            return (index, (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset()))

        def unpack(packed: Any) -> torch.Tensor:
            index, what = packed
            if index is None:
                return outer_unpack(what)
            _, size, stride, offset = what
            # The value is whole for as long as what this returns, or anything made of it, is there.
            value = from_dlpack(core.read(index)).as_strided(size, stride, offset)
            value.ds_status = ZeroParamStatus.AVAILABLE  # type: ignore[attr-defined]
            return value

        pack.values = self  # type: ignore[attr-defined]
        return (pack, unpack)


def _kept(tensor: torch.Tensor) -> Any:
    return (tensor.detach(), tensor._version)


def _given_back(kept: Any) -> torch.Tensor:
    tensor, version = kept
    if tensor._version != version:
        raise RuntimeError(
            f"a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place since it was saved "
            f"(version {tensor._version}, expected {version})"
        )
    return tensor


class _Asked(dict):
    """A module's parameters, which come when a module that runs asks for one by name."""

    def __init__(self, params: dict, values: Coming) -> None:
        super().__init__(params)
        self._values = values

    def __getitem__(self, name: str) -> Any:
        param = super().__getitem__(name)
        if param is not None:
            self._values.asked(param)
        return param
