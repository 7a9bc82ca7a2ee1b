"""Ranks talk: DeepSpeed's ``comm`` over our own collectives, on CPU tensors, in place.

Ranks are those that a launcher started (``ferrospeed launch --python``, torchrun, mpirun, srun, or ``RANK`` and ``WORLD_SIZE``).
Results are the same bits on every rank and in every run; a rank that is lost, late or does something else is named in a
:class:`ferrospeed.CommError`. Nothing here waits with Python's lock held.
"""

from __future__ import annotations

import atexit
import enum
import json
from typing import Any, Sequence

from . import _ferrospeed
from ._ferrospeed import FerrospeedError, Group

__all__ = [
    "Group", "ReduceOp", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single",
    "barrier", "broadcast", "broadcast_object_list", "destroy_process_group", "get_global_rank", "get_local_rank", "get_rank",
    "get_world_group", "get_world_size", "init_distributed", "is_available", "is_initialized", "new_group", "recv", "reduce",
    "reduce_scatter_tensor", "send",
]


class ReduceOp(enum.Enum):
    """How the elements of several ranks become one."""

    SUM = "sum"
    AVG = "avg"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    BAND = "bit_and"
    BOR = "bit_or"


def init_distributed(dist_backend: str | None = None, **options: Any) -> None:
    """Meets the other ranks; a second call changes nothing.

    Backends, ports and ranks come from the launcher's environment. DeepSpeed's arguments are taken where they say the same:
    ``dist_backend`` may be None, "gloo", "ccl", "mpi" or "nccl", which all mean the way of talking that the environment has.
    """
    known = {"auto_mpi_discovery", "distributed_port", "verbose", "timeout", "init_method", "dist_init_required", "config", "rank", "world_size"}
    unknown = sorted(set(options) - known)
    if unknown:
        raise TypeError(f"init_distributed() has no argument '{unknown[0]}'")
    if dist_backend not in (None, "gloo", "ccl", "mpi", "nccl", "auto", "local", "tcp"):
        raise FerrospeedError(f"init_distributed: '{dist_backend}' is no backend that is known here")
    if options.get("init_method") is not None:
        raise FerrospeedError("init_distributed: init_method is not taken; set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE")
    if not is_initialized():
        _ferrospeed.init_distributed()
        # Who ends says so: the others need not find out.
        atexit.register(_ferrospeed.destroy)
    for name, there in (("rank", get_rank()), ("world_size", get_world_size())):
        asked = options.get(name, -1)
        if asked not in (None, -1) and asked != there:
            raise FerrospeedError(f"init_distributed: {name}={asked}, but the launcher says {there}")


def is_available() -> bool:
    """Always: ranks need nothing but this package."""
    return True


def is_initialized() -> bool:
    """Whether the ranks have met."""
    return _ferrospeed.is_initialized()


def destroy_process_group(group: Group | None = None) -> None:
    """Leaves the job, once its engines and groups are gone."""
    if group is None:
        _ferrospeed.destroy()


def _of(group: Group | None) -> Group:
    return _ferrospeed.world_group() if group is None else group


def get_world_group() -> Group:
    """The group of all ranks."""
    return _ferrospeed.world_group()


def get_rank(group: Group | None = None) -> int:
    """This rank's number; 0 where nobody has met."""
    return _of(group).rank() if is_initialized() else 0


def get_world_size(group: Group | None = None) -> int:
    """How many ranks there are; 1 where nobody has met."""
    return _of(group).size() if is_initialized() else 1


def get_local_rank() -> int:
    """This rank's number on its host."""
    return _ferrospeed.local_rank() if is_initialized() else 0


def get_global_rank(group: Group | None, group_rank: int) -> int:
    """The number in the world of a group's rank."""
    return _of(group).ranks()[group_rank]


def new_group(ranks: Sequence[int]) -> Group | None:
    """A group of some ranks; None on those that are not in it. All ranks of the world call it, in the same order."""
    return _ferrospeed.new_group(list(ranks))


def _root(rank: int, group: Group) -> int:
    """Roots are told as ranks of the world, as torch does."""
    ranks = group.ranks()
    if rank not in ranks:
        raise FerrospeedError(f"rank {rank} is not in the group of {ranks}")
    return ranks.index(rank)


def _place(tensor: Any, call: str) -> tuple[int, int, str]:
    """A tensor as the engine takes it: address, number of elements, type."""
    if tensor.device.type != "cpu":
        raise FerrospeedError(f"{call}: a tensor on {tensor.device}; collectives from Python are on CPU tensors")
    if not tensor.is_contiguous():
        raise FerrospeedError(f"{call}: a tensor with gaps; give tensor.contiguous()")
    return tensor.data_ptr(), tensor.numel(), str(tensor.dtype).removeprefix("torch.")


def _op(op: Any) -> str:
    if isinstance(op, ReduceOp):
        return op.value
    # torch's, by its name: RedOpType.SUM
    name = str(op).rpartition(".")[2].upper()
    if name not in ReduceOp.__members__:
        raise FerrospeedError(f"'{op}' is no reduction; there are {', '.join(ReduceOp.__members__)}")
    return ReduceOp[name].value


class _Done:
    """What an operation that is over gives to whoever asked for it asynchronously."""

    def wait(self) -> None:
        """Returns at once."""

    def is_completed(self) -> bool:
        """Always."""
        return True


def _done(async_op: bool) -> _Done | None:
    return _Done() if async_op else None


def barrier(group: Group | None = None, async_op: bool = False, **_: Any) -> _Done | None:
    """Waits until every rank of the group is here."""
    _of(group).barrier()
    return _done(async_op)


def all_reduce(tensor: Any, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False) -> _Done | None:
    """Replaces the tensor on every rank by the reduction over all."""
    _of(group).all_reduce(_place(tensor, "all_reduce"), _op(op))
    return _done(async_op)


def reduce(tensor: Any, dst: int, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False) -> _Done | None:
    """The same on one rank."""
    group = _of(group)
    group.reduce(_place(tensor, "reduce"), _op(op), _root(dst, group))
    return _done(async_op)


def broadcast(tensor: Any, src: int, group: Group | None = None, async_op: bool = False) -> _Done | None:
    """Gives every rank the data of ``src``."""
    group = _of(group)
    group.broadcast(_place(tensor, "broadcast"), _root(src, group))
    return _done(async_op)


def all_gather_into_tensor(output: Any, tensor: Any, group: Group | None = None, async_op: bool = False) -> _Done | None:
    """Gives every rank the tensors of all, one behind the other."""
    _of(group).all_gather(_place(tensor, "all_gather"), _place(output, "all_gather"))
    return _done(async_op)


def all_gather(tensor_list: list[Any], tensor: Any, group: Group | None = None, async_op: bool = False) -> _Done | None:
    """The same into one tensor per rank."""
    import torch

    group = _of(group)
    whole = torch.empty((group.size() * tensor.numel(),), dtype=tensor.dtype)
    group.all_gather(_place(tensor.contiguous(), "all_gather"), _place(whole, "all_gather"))
    for target, part in zip(tensor_list, whole.chunk(group.size()), strict=True):
        target.copy_(part.view(target.shape))
    return _done(async_op)


def reduce_scatter_tensor(output: Any, tensor: Any, op: Any = ReduceOp.SUM, group: Group | None = None, async_op: bool = False) -> _Done | None:
    """Gives rank i the i-th part of the reduction."""
    _of(group).reduce_scatter(_place(tensor, "reduce_scatter"), _place(output, "reduce_scatter"), _op(op))
    return _done(async_op)


def all_to_all_single(output: Any, tensor: Any, group: Group | None = None, async_op: bool = False) -> _Done | None:
    """Gives rank i the i-th equal part of every rank's tensor."""
    _of(group).all_to_all(_place(tensor, "all_to_all"), _place(output, "all_to_all"))
    return _done(async_op)


def send(tensor: Any, dst: int, group: Group | None = None, tag: int = 0) -> None:
    """Sends to a rank."""
    group = _of(group)
    group.send(_place(tensor, "send"), _root(dst, group), tag)


def recv(tensor: Any, src: int, group: Group | None = None, tag: int = 0) -> int:
    """Receives from a rank."""
    group = _of(group)
    group.recv(_place(tensor, "recv"), _root(src, group), tag)
    return src


def _text(value: Any, call: str) -> bytes:
    try:
        return json.dumps(value).encode()
    except TypeError as error:
        raise FerrospeedError(f"{call}: objects travel as JSON, since no code from a peer ever runs here: {error}") from None


def all_gather_object(object_list: list[Any], value: Any, group: Group | None = None) -> None:
    """Gives every rank the objects of all: what JSON can say."""
    gathered = _of(group).all_gather_bytes(_text(value, "all_gather_object"))
    object_list[:] = [json.loads(bytes(text)) for text in gathered]


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Group | None = None, **_: Any) -> None:
    """Gives every rank the objects of ``src``: what JSON can say."""
    group = _of(group)
    root = _root(src, group)
    own = _text(object_list, "broadcast_object_list") if group.rank() == root else b""
    object_list[:] = json.loads(bytes(group.all_gather_bytes(own)[root]))
