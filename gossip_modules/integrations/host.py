"""What the integrations share: making the wrapper, and the file of each rank beside the checkpoint of a host."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..registry import named
from ..transport.agreement import check_agreement
from ..transport.process_group import ProcessGroupTransport
from ..wrappers.base import GossipWrapper
from ..wrappers.gossip import GossipDataParallel
from ..wrappers.state import plain

Gossip: TypeAlias = Mapping[str, Any] | Callable[[nn.Module], GossipWrapper] | None
"""The `gossip=` of a host: arguments of `GossipDataParallel`, or a function that wraps a module, such as
`functools.partial(BilatGossipDataParallel, graph="ring")`; None = `GossipDataParallel(module)`."""


class Stateful(Protocol):
    """An optimizer, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]:
        """See torch."""

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """See torch."""


def missing(package: str, error: ModuleNotFoundError) -> ImportError:
    """The error to raise where an optional package is not installed."""
    return ImportError(
        f"gossip_modules.integrations.{package} needs the package {package} ({error}); in a clone: "
        f"pip install '.[{package}]'"
    )


def check_gossip(gossip: Gossip, *, host: str) -> Gossip:
    """Return `gossip`, of a host with this class, unless it asks for what hosts cannot do.

    Raises:
        ValueError: a membership, or the name of a method that is no algorithm with defaults.
    """
    options = gossip if isinstance(gossip, Mapping) else getattr(gossip, "keywords", {})
    if options.get("membership") is not None:
        raise ValueError(
            f"got membership= in gossip= of {host}, expected none: samplers, barriers and checkpoints of a host count "
            "on ranks that stay; write the loop by hand, with GossipDataParallel(model, membership=membership)"
        )
    if isinstance(name := options.get("algorithm"), str) and not (method := named(name)).is_complete:
        what = "has settings without a default" if method.is_algorithm else "is a wrapper with arguments"
        raise ValueError(
            f"got algorithm={name!r} in gossip= of {host}, which {what}, expected an algorithm or the name of one; "
            + (f"write {_in_host(method.example)}" if "AllReduce" not in method.example else _NO_GOSSIP)
        )
    return gossip


_NO_GOSSIP = "take the class of the host without gossip, whose DistributedDataParallel averages gradients"


def _in_host(example: str) -> str:
    """The `gossip=` of a host for a line that wraps a model: "GossipDataParallel(model, overlap=True)"."""
    wrapper, _, arguments = example.removesuffix(")").partition("(model")
    arguments = arguments.removeprefix(", ")
    if wrapper == GossipDataParallel.__name__:
        return f"gossip=dict({arguments})"
    return f"gossip=functools.partial({', '.join(filter(None, [wrapper, arguments]))})"


def wrap(module: nn.Module, gossip: Gossip, *, host: str) -> GossipWrapper:
    """The wrapper around a module that `gossip` asks for.

    Args:
        module: a plain one, on its device, whose forward is what the host makes of it (autocast).
        gossip: see `Gossip`.
        host: the class that wraps, for errors.

    Raises:
        ValueError: `gossip` is of another kind, or makes something else; or see the wrapper.
    """
    if isinstance(module, GossipWrapper):
        raise ValueError(
            f"got a {type(module).__name__} in {host}, expected the plain module, which {host} wraps after it has "
            "added autocast to its forward; pass the module, and the arguments of the wrapper as gossip=dict(...)"
        )
    if gossip is None or isinstance(gossip, Mapping):
        return GossipDataParallel(module, **(gossip or {}))
    wrapper = gossip(module) if callable(gossip) else gossip
    if not isinstance(wrapper, GossipWrapper):
        raise ValueError(
            f"got gossip={gossip!r} of {host}, expected a dict of arguments of GossipDataParallel, or a function of "
            "the module that returns a gossip wrapper, such as "
            "functools.partial(BilatGossipDataParallel, graph='ring')"
        )
    return wrapper


# [Note: A file for each rank] The checkpoint of a host has one model, which is the average under the names of the
# plain module, so that any tool reads it. Ranks have models, optimizers and memory of their own, which a resumed run
# needs. They are in one file for each rank beside it, which `torch.load(weights_only=True)` takes. A host loads its own
# file as ever; what the file of the rank has comes after it, in its place.


def rank_name() -> str:
    """The beginning of the name of this rank's file."""
    return f"gossip_rank_{dist.get_rank()}_of_{dist.get_world_size()}"


def own_models(wrappers: Iterable[GossipWrapper]) -> list[dict[str, Any]]:
    """The state of each wrapper on this rank, at one point of training on all ranks; collective.

    Plain dicts and tensors, which share memory with the models: tools may copy them entry by entry.
    """
    states = []
    for wrapper in wrappers:
        wrapper.settle()
        states.append({"model": dict(wrapper.module.state_dict()), "gossip": plain(wrapper.get_extra_state())})
    return states


class OwnFile:
    """The file of this rank, which is read now and compared with the files of other ranks when there is a wrapper.

    Args:
        read: returns the content of the file; raises FileNotFoundError if the file does not exist.
        where: the file, for messages.

    Attributes:
        content: the content; {} if the file is missing or damaged.
    """

    def __init__(self, read: Callable[[], dict[str, Any]], *, where: object) -> None:
        self.content: dict[str, Any] = {}
        self._where, self._damage = where, None
        try:
            content = read()
            self._found = f"there, of {len(content['models'])} models"
            self.content = content
        except FileNotFoundError:
            self._found = "missing"
        except Exception as error:  # noqa: BLE001 (a file may be anything)
            self._found, self._damage = "damaged", error

    def compared(self, wrappers: Sequence[GossipWrapper]) -> dict[str, Any]:
        """The content, or {} where all ranks lack a file, which a warning tells; collective.

        Args:
            wrappers: of the models in the file.

        Raises:
            ValueError: on all ranks: some have a file and others do not, or it cannot be read, or has another number
                of models.
        """
        for wrapper in wrappers[:1]:
            transport = getattr(wrapper._local.averager, "transport", None)  # none with a membership
            if isinstance(transport, ProcessGroupTransport):
                remedy, found = "give every rank the folder with the files of all ranks", self._found
                check_agreement(transport, {"the file of the rank": found}, what="comparing checkpoints", remedy=remedy)
        if (damage := self._damage) is not None:
            raise ValueError(
                f"got {self._where}, which cannot be read ({type(damage).__name__}: {damage}), expected the file of "
                "this rank beside the checkpoint; take an earlier checkpoint, or remove the files of all ranks to go "
                "on from the average"
            ) from damage
        if not self.content and wrappers:
            warnings.warn(
                f"got no file {self._where}, expected the state of this rank of {dist.get_world_size()}: training goes "
                "on from the one model of the checkpoint on all ranks, with the optimizer of rank 0 and a new state of "
                "gossip, as after a change of the number of ranks",
                stacklevel=3,
            )
        elif self.content and len(self.content["models"]) != len(wrappers):
            raise ValueError(
                f"got {len(self.content['models'])} gossip models in {self._where}, expected {len(wrappers)}; prepare "
                "the models with which it was saved"
            )
        return self.content


def plain_part(tree: Mapping[str, Any], *, where: str) -> dict[str, Any]:
    """The entries of plain values and tensors, which `torch.load(weights_only=True)` takes; a warning names others.

    Args:
        tree: the entries; shares memory.
        where: its place, for the warning.
    """
    found = {name: value for name, value in tree.items() if _is_plain(value)}
    if others := [name for name in tree if name not in found]:
        warnings.warn(
            f"got {', '.join(others)} in {where}, expected tensors, numbers, strings, lists, tuples and dicts, which "
            "load without pickle: the file of this rank leaves it out, so all ranks resume with the one of rank 0; "
            "keep plain values there",
            stacklevel=3,
        )
    return found


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device})


def _is_plain(value: Any) -> bool:
    kind = type(value)
    if kind in (dict, OrderedDict):
        return all(map(_is_plain, (*value.keys(), *value.values())))
    if kind in (list, tuple, set):
        return all(map(_is_plain, value))
    return kind in _PLAIN or kind in (Tensor, nn.Parameter)


def load_models(wrappers: Sequence[GossipWrapper], states: Sequence[Any] | None) -> None:
    """Load what `own_models` gave; None: the modules keep the one model of the checkpoint."""
    for wrapper, state in zip(wrappers, states or [None] * len(wrappers), strict=True):
        wrapper.before_load()
        wrapper.set_extra_state(None if state is None else state["gossip"])
        if state is not None:
            wrapper.module.load_state_dict(state["model"])


def save_rank(folder: str | Path, wrappers: Sequence[GossipWrapper], **parts: Sequence[Stateful]) -> None:
    """Write the file of this rank; collective: [Note: A file for each rank].

    Args:
        folder: made if it is not there.
        wrappers: the wrappers of the models.
        parts: what else differs from rank to rank, such as optimizers, by name.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    states = {name: [part.state_dict() for part in of_name] for name, of_name in parts.items()}
    path = Path(folder) / f"{rank_name()}.pt"
    torch.save({"models": own_models(wrappers), **states}, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)  # never half a file under the name


def read_rank(folder: str | Path, wrappers: Sequence[GossipWrapper]) -> dict[str, Any]:
    """What `save_rank` wrote, or {} where ranks have no file; see `OwnFile`."""
    path = Path(folder) / f"{rank_name()}.pt"
    return OwnFile(lambda: torch.load(path, map_location="cpu", weights_only=True), where=path).compared(wrappers)


def load_rank(content: Mapping[str, Any], wrappers: Sequence[GossipWrapper], **parts: Sequence[Stateful]) -> None:
    """Load what `read_rank` gave."""
    load_models(wrappers, content.get("models"))
    for name, of_name in parts.items() if content else ():
        for part, state in zip(of_name, content[name], strict=True):
            part.load_state_dict(state)
