"""The engine that `initialize` gives: forward, backward, step."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any, Iterator

import torch
from torch.utils.dlpack import from_dlpack

from . import _ferrospeed, comm
from ._ferrospeed import Engine as Core
from ._ferrospeed import FerrospeedError
from ._module import _TYPES, Buffers, Coming, Gradients, Lasting, Named
from .zero import OWNERS


class FerrospeedEngine(torch.nn.Module):
    """A torch module whose parameters, gradients and optimizer states are this engine's."""

    def __init__(self, core: Core, model: torch.nn.Module, named: Named, buffers: Buffers, trained: list[bool]) -> None:
        super().__init__()
        self._core, self._named, self._buffers_of_module = core, named, buffers
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.training_dataloader: Any = None
        self._steps_schedule = False
        self._backward = _Backward.NONE
        self._scaled = False
        self._depth = 0
        self.last_step_skipped = False
        dtype = _TYPES[core.dtype()]
        for each in model.modules():
            for name, buffer in each._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    each._buffers[name] = buffer.to(dtype)
        self._values = Coming(core, named) if core.stage() == 3 else Lasting(core, named)
        self._values.attach(model)
        model.register_forward_pre_hook(self._begin_forward, prepend=True)
        model.register_forward_hook(self._end_forward, always_call=True)
        self._gradients = Gradients(core, named, trained, self._begin_plain)
        self.module = model
        self.config: dict[str, Any] = json.loads(core.config())
        self.training = model.training
        OWNERS.note(self, named.params)

    def adopt(self, optimizer: Any, schedule: Any, client: bool) -> None:
        """Takes the optimizer and the schedule that were made for it; one of the program's own is stepped by `step`."""
        self.optimizer, self.lr_scheduler, self._steps_schedule = optimizer, schedule, client

    # Forward.

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Runs the module."""
        return self.module(*inputs, **named)

    def _begin_forward(self, module: torch.nn.Module, inputs: Any) -> None:
        self._depth += 1
        if self._depth == 1 and self._backward is _Backward.NONE:
            self._core.set_mode(torch.is_grad_enabled())
            self._core.begin_forward()

    def _end_forward(self, module: torch.nn.Module, inputs: Any, outputs: Any) -> None:
        self._depth -= 1

    # Backward.

    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Computes gradients of a scalar loss and averages them over ranks. Returns the loss as it counts in the step."""
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            what = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise FerrospeedError(f"backward: the loss is {what}, and must be a tensor with one element")
        self._core.set_mode(True)
        seed = self._core.begin_backward(scale_wrt_gas, retain_graph)
        self._backward = _Backward.OURS
        try:
            root = loss.float()
            root.backward(gradient=torch.full_like(root, seed), retain_graph=retain_graph)
            self._core.end_backward(loss.item())
        except BaseException:
            self._abandon()
            raise
        finally:
            self._backward = _Backward.NONE
        return loss.detach() / self.gradient_accumulation_steps() if scale_wrt_gas else loss.detach()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss for a backward of its own, `engine.scale(loss).backward()`: divided by the number of micro-batches of a
        step, and multiplied by the loss scale."""
        self._scaled = True
        return loss.float() * (self._core.loss_scale() / self.gradient_accumulation_steps())

    def _begin_plain(self) -> None:
        """A gradient came: where no backward of the engine's is under way, this is the first of a plain `loss.backward()`."""
        if self._backward is not _Backward.NONE:
            return
        if self._core.loss_scale() != 1.0 and not self._scaled:
            raise FerrospeedError(
                "loss.backward(): in fp16 the loss must be scaled; call engine.backward(loss), or engine.scale(loss).backward()"
            )
        self._core.set_mode(True)
        self._core.begin_backward(False, False)
        self._backward = _Backward.PLAIN
        torch.autograd.Variable._execution_engine.queue_callback(self._end_plain)

    def _end_plain(self) -> None:
        try:
            self._core.end_backward(None)
        finally:
            self._backward, self._scaled = _Backward.NONE, False

    def _abandon(self) -> None:
        """What a backward that failed has left must not join the next."""
        self._values.end()
        self._core.abandon_backward()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients of backwards within are not averaged over ranks yet: they join the next that is."""
        self._core.set_synchronize(False)
        try:
            yield
        finally:
            self._core.set_synchronize(True)

    # Step.

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Ends a micro-batch; at the end of an accumulation, updates the weights. All ranks call it together."""
        if self.optimizer is not None:
            self.optimizer.push()
        applied = self._core.step()
        self.last_step_skipped = applied is False
        if applied and self._steps_schedule:
            # torch's schedules warn where their optimizer has not stepped before them: it has, here.
            if hasattr(self.lr_scheduler, "optimizer"):
                self.lr_scheduler.optimizer._opt_called = True
            self.lr_scheduler.step(**(lr_kwargs or {}))
            self.optimizer.push()
        elif applied:
            self.optimizer.pull()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drops the gradients that wait for a step."""
        self._core.zero_grad()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next step updates weights."""
        return self._core.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Says by hand whether the next step updates weights; None counts again."""
        self._core.set_boundary(is_boundary)

    def was_step_applied(self) -> bool:
        """Whether the last step changed the weights."""
        return self._core.was_step_applied()

    # Facts.

    @property
    def global_steps(self) -> int:
        """Steps taken, skipped ones included."""
        return self._core.counters()[0]

    @property
    def global_samples(self) -> int:
        """Samples seen by all ranks."""
        return self._core.counters()[1]

    @property
    def micro_steps(self) -> int:
        """Micro-batches seen by this rank."""
        return self._core.counters()[2]

    @property
    def skipped_steps(self) -> int:
        """Steps that changed nothing, because a gradient was not a number."""
        return self._core.counters()[3]

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last applied step's averaged gradient, before clipping."""
        return self._core.grad_norm()

    def get_lr(self) -> list[float]:
        """The learning rate of each group."""
        return [options[0] for options in self._core.group_options()]

    def set_lr(self, lr: float) -> None:
        """Sets the learning rate of all groups."""
        for index, (_, weight_decay, betas) in enumerate(self._core.group_options()):
            self._core.set_group_options(index, lr, weight_decay, betas)
        if self.optimizer is not None:
            self.optimizer.pull()

    def get_mom(self) -> list[list[float]]:
        """The decay rates of each group."""
        return [list(options[2]) for options in self._core.group_options()]

    def train_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self._core.batch_sizes()[0]

    def train_micro_batch_size_per_gpu(self) -> int:
        """Samples per micro-batch and rank."""
        return self._core.batch_sizes()[1]

    def gradient_accumulation_steps(self) -> int:
        """Micro-batches per step."""
        return self._core.batch_sizes()[2]

    def gradient_clipping(self) -> float:
        """The largest norm; 0 where gradients are not clipped."""
        return float(self.config.get("gradient_clipping") or 0.0)

    def zero_optimization_stage(self) -> int:
        """The ZeRO stage."""
        return self._core.stage()

    def zero_optimization_partition_weights(self) -> bool:
        """Whether weights are spread over ranks."""
        return self._core.stage() == 3

    def fp16_enabled(self) -> bool:
        """Whether kernels compute in fp16."""
        return self._core.dtype() == "float16"

    def bfloat16_enabled(self) -> bool:
        """Whether kernels compute in bf16."""
        return self._core.dtype() == "bfloat16"

    @property
    def loss_scale(self) -> float:
        """What the loss is multiplied by before backward; 1 outside fp16."""
        return self._core.loss_scale()

    @property
    def dtype(self) -> torch.dtype:
        """The type in which kernels compute."""
        return _TYPES[self._core.dtype()]

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return torch.device("cpu")

    @property
    def local_rank(self) -> int:
        """This rank's number on its host."""
        return comm.get_local_rank()

    @property
    def global_rank(self) -> int:
        """This rank's number."""
        return comm.get_rank()

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return comm.get_world_size()

    @property
    def dp_world_size(self) -> int:
        """How many ranks see samples of their own."""
        return comm.get_world_size()

    # Checkpoints.

    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        format: str = "ferrospeed",
    ) -> bool:
        """Writes a checkpoint, whole or not at all. All ranks call it together.

        ``client_state`` is what JSON can say. ``format`` is "ferrospeed", "deepspeed" (DeepSpeed's files for this number of ranks
        and this stage) or "universal".
        """
        try:
            kept = json.dumps({"client_state": client_state or {}, "schedule": self._schedule_state()})
        except TypeError as error:
            raise FerrospeedError(f"save_checkpoint: client_state holds what JSON cannot say: {error}") from None
        tag = None if tag is None else str(tag)
        self._buffers_of_module.lay_down()
        _ferrospeed.save(self._core, save_dir, tag, kept, save_latest, exclude_frozen_parameters, format)
        return True

    def _schedule_state(self) -> Any:
        if not self._steps_schedule or not hasattr(self.lr_scheduler, "state_dict"):
            return None
        return {name: value for name, value in self.lr_scheduler.state_dict().items() if not callable(value)}

    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str, dict[str, Any]]:
        """Loads a checkpoint of ours or of DeepSpeed's, made on any number of ranks. All ranks call it together.

        Returns its folder and the ``client_state`` that was saved with it.
        """
        if custom_load_fn is not None:
            raise NotImplementedError("load_checkpoint: custom_load_fn is not taken")
        flags = (load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only)
        self._buffers_of_module.lay_down()
        path, text = _ferrospeed.load(self._core, load_dir, None if tag is None else str(tag), *flags)
        self._buffers_of_module.give_back()
        if self.optimizer is not None:
            self.optimizer.pull()
        kept = json.loads(text) or {}
        if self._steps_schedule and load_lr_scheduler_states and not load_module_only and kept.get("schedule"):
            self.lr_scheduler.load_state_dict(kept["schedule"])
        return os.fspath(path), kept.get("client_state", kept)

    def save_16bit_model(
        self, save_dir: str | os.PathLike[str], save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Writes the weights as kernels read them into one torch file. All ranks call it together."""
        _ferrospeed.save_16bit_model(self._core, save_dir, save_filename, exclude_frozen_parameters)
        return True

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Always: a model is saved whole in every stage, one tensor at a time."""
        return True

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor] | None:
        """Whole weights as kernels read them, and buffers, on rank 0; None on others. All ranks call it together."""
        wanted = [index for index, param in enumerate(self._named.params) if param.requires_grad or not exclude_frozen_parameters]
        found: dict[str, torch.Tensor] = {}
        for index in wanted:
            value = from_dlpack(self._core.read(index))
            if comm.get_rank() == 0:
                found[self._named.names[index]] = value.clone()
        if comm.get_rank() != 0:
            return None
        for alias, name in self._named.aliases.items():
            if name in found:
                found[alias] = found[name]
        return found | self._buffers_of_module.now()

    def destroy(self) -> None:
        """Lets go of hooks; memory goes with the last reference."""
        for handle in self._gradients.handles:
            handle.remove()

    def module_state_dict(self, *_: Any, **__: Any) -> Any:
        """Not here: use `save_16bit_model`, `zero.GatheredParameters` or a checkpoint."""
        raise NotImplementedError("module_state_dict(): use save_16bit_model, or state_dict() under zero.GatheredParameters")

    # The module.

    def train(self, mode: bool = True) -> "FerrospeedEngine":
        """As torch's: dropout on, or off."""
        super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            module = self.__dict__.get("_modules", {}).get("module")
            if module is not None and not name.startswith("__") and hasattr(module, name):
                return getattr(module, name)
            raise AttributeError(f"the engine has no attribute '{name}', and its module has none either") from None


class _Backward:
    """Whose backward is under way."""

    NONE = "none"
    OURS = "engine.backward"
    PLAIN = "loss.backward"
