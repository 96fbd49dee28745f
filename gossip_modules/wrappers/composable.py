"""gossip: `GossipDataParallel` applied to a module in place, without a wrapper around it."""

from __future__ import annotations

import contextlib
import copyreg
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch import Tensor, nn
from torch.optim import Optimizer

from ..engine.measuring import OverlapChoice
from ..flat.slots import check_module
from ..flat.transformed import is_transformed, refuse_scripting
from .checkpoint import Checkpoint
from .composition import check_inside
from .gossip import GossipDataParallel
from .state import KEY, drop_state, keeps_extra_state, plain, put_state, warn_stateless


def gossip(module: nn.Module, **options: Any) -> GossipModule:
    """As `GossipDataParallel(module, **options)`, but the module itself is changed, and returned.

    A forward pre-hook runs the round of each step, so the arithmetic is the same as in `GossipDataParallel` bit for
    bit. Names have no "module." in front. The type of the module becomes a subclass of its class and of `GossipModule`,
    with the methods of the wrapper, as with `torch.distributed.fsdp.fully_shard`. The name of the type, and
    `module.__class__`, do not change. `Join` needs a wrapper.

    Args:
        module: the model, on its device; changed in place.
        options: any argument of `GossipDataParallel` but `nprocs_per_node`: this one needs a wrapper.

    Raises:
        ValueError: the module has an attribute with the name of an added method; or see `GossipDataParallel`.

    Warns:
        UserWarning: the class of the module has a `__call__` of its own, perhaps without hooks.

    Example:
        >>> model = gossip(nn.Linear(10, 2), push_sum=False)
        >>> model(torch.randn(4, 10)).sum().backward()  # gossips, then computes
        >>> torch.save(model.state_dict(), "rank0.pt")  # "weight" and "bias"
        >>> model.close()
    """
    _check(module, options)
    wrapper = GossipDataParallel(module, **options)
    module.__dict__["_gossip"] = wrapper  # not a submodule: it would be in the state dict
    _become(module, _with_gossip(type(module)))
    module.register_forward_pre_hook(_before_forward, prepend=True)
    module.register_forward_hook(_after_forward)
    assert isinstance(module, GossipModule)
    return module


def _forwarded(name: str) -> Callable[..., Any]:
    """The method of that name of `GossipDataParallel`, for a module with one in `_gossip`."""
    method = getattr(GossipDataParallel, name)

    @functools.wraps(method)
    def call(self: GossipModule, *args: Any, **kwargs: Any) -> Any:
        return method(self._gossip, *args, **kwargs)

    return call


class GossipModule(nn.Module):
    """The methods added to the class of a module by `gossip`: all methods of its `GossipDataParallel`."""

    _gossip: GossipDataParallel

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """A plain module: containers make others of their class, as in `model[:2]`, which do not gossip."""
        plain: Any = _plain(cls)
        self = plain.__new__(plain)
        self.__init__(*args, **kwargs)
        return self

    @property
    def __class__(self) -> Any:
        """The plain class, for tools that go by the class of a module or save its name; `isinstance` knows both.

        Setting it makes the module one of that class, and of `GossipModule` as before.
        """
        return _plain(type(self))

    @__class__.setter
    def __class__(self, plain: Any) -> None:
        _become(self, _with_gossip(plain))

    flush = _forwarded("flush")
    settle = _forwarded("settle")
    close = _forwarded("close")
    no_sync = _forwarded("no_sync")
    gossip_step = _forwarded("gossip_step")
    average_ = _forwarded("average_")
    follow = _forwarded("follow")
    consensus_distance = _forwarded("consensus_distance")
    comm_stats = _forwarded("comm_stats")
    declare_regions = _forwarded("declare_regions")
    count_tokens = _forwarded("count_tokens")

    @property
    def overlap_choice(self) -> OverlapChoice | None:
        """See `GossipDataParallel.overlap_choice`."""
        return self._gossip.overlap_choice

    @property
    def require_backward_grad_sync(self) -> bool:
        """See `GossipDataParallel.require_backward_grad_sync`."""
        return self._gossip.require_backward_grad_sync

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._gossip.require_backward_grad_sync = value

    @contextlib.contextmanager
    def averaged(self) -> Iterator[GossipModule]:
        """See `GossipDataParallel.averaged`."""
        with self._gossip.averaged():
            yield self

    def averaged_state_dict(self, **options: Any) -> dict[str, Any]:
        """See `GossipDataParallel.averaged_state_dict`."""
        state = self._gossip.averaged_state_dict(**options)
        drop_state(state)  # the average is no rank's own state
        return state

    def checkpoint(self, *optimizers: Optimizer) -> Checkpoint:
        """See `GossipDataParallel.checkpoint`."""
        return self._gossip.checkpoint_of(self, optimizers)

    def join_hook(self, **_: Any) -> NoReturn:
        """Raises TypeError: `Join` needs a wrapper."""
        raise TypeError(
            "got a module of gossip() in Join, expected a wrapper, which tells the others of each step; use "
            "Join([GossipDataParallel(module)])"
        )

    def _remove_gossip(self) -> None:
        """Become a plain module again, for another wrapper; called at `close()`."""
        _become(self, _plain(type(self)))
        del self.__dict__["_gossip"]
        for hooks in (self._forward_pre_hooks, self._forward_hooks):
            for key in [key for key, hook in hooks.items() if hook in (_before_forward, _after_forward)]:
                del hooks[key]

    def __prepare_scriptable__(self) -> NoReturn:
        refuse_scripting("module of gossip()", "script a plain copy, to which you load model.averaged_state_dict()")

    # What nn.Module does, with a flush before it.

    def train(self, mode: bool = True) -> Any:
        """As `nn.Module.train`, after a flush; eval mode also ends the current step."""
        self._gossip.before_mode(mode)
        return super().train(mode)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`, de-biased; gossip state, with the rounds in flight, is in its metadata."""
        save, gossip = super().state_dict, self._gossip
        prefix, has_place = gossip._prefix_in(args, kwargs), not keeps_extra_state(self)
        return gossip.saved_by(lambda: save(*args, **kwargs), prefix, inside="", has_place=has_place)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if hasattr(destination, "_metadata"):
            state = plain(self._gossip.get_extra_state())
            put_state(destination, prefix, state, self._gossip.own_place, has_key=not keeps_extra_state(self))

    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, local_metadata: Any, *args: Any, **kwargs: Any
    ) -> None:
        _check_names(state_dict, prefix, self)
        self._gossip.before_load()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *args, **kwargs)
        if KEY not in local_metadata:
            warn_stateless()
        self._gossip.set_extra_state(local_metadata.get(KEY))

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._gossip.flush()
        return super()._apply(fn, recurse)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the plain class; the class of a copy is made from it again."""
        self._gossip.flush()
        reduced: Any = super().__reduce_ex__(max(int(protocol), 2))
        if reduced[0].__module__ != copyreg.__name__:  # the class makes its copies itself: they are plain modules
            return reduced
        return _blank, (_plain(type(self)),), *reduced[2:]


_classes: dict[type, type[GossipModule]] = {}
_ADDED = [name for name in vars(GossipModule) if not name.startswith("_") and not hasattr(nn.Module, name)]


def _before_forward(module: Any, inputs: Any) -> None:
    """The pre-hook; it uses its argument, the module, so that it serves copies too."""
    if not is_transformed():
        module._gossip._before_forward()


def _after_forward(module: Any, inputs: Any, output: Any) -> None:
    """The forward hook; torch does not call it after an error in the forward."""
    if not is_transformed():
        module._gossip._local.loop.has_ended = True


def _check(module: nn.Module, options: Mapping[str, Any]) -> None:
    """Raise, or warn, as `gossip` says."""
    if options.get("nprocs_per_node", 1) != 1:
        raise ValueError(
            f"got nprocs_per_node={options['nprocs_per_node']} for gossip(), expected 1: nodes need a wrapper; use "
            "GossipDataParallel(module, nprocs_per_node=...)"
        )
    check_inside(module, wrapper="gossip()")
    check_module(module)
    if isinstance(module, GossipModule):  # closed, so it becomes a plain one
        return
    if taken := [name for name in _ADDED if hasattr(module, name)]:
        raise ValueError(
            f"got a {type(module).__name__} that has {', '.join(taken)} of its own, expected none of the names that "
            "gossip() adds; rename them, or use GossipDataParallel(module), which keeps names apart"
        )
    plain = type(module)
    try:
        _become(module, _with_gossip(plain))
    except TypeError as error:
        raise ValueError(
            f"got a {plain.__name__}, of which gossip() can make no subclass: {error}; expected a module of a class "
            "that is open to subclasses; use GossipDataParallel(module), which leaves the class as it is"
        ) from error
    _become(module, plain)
    if type(module).__call__ is not nn.Module.__call__:  # it may run no hooks: every rank would train alone
        warnings.warn(
            f"got a {type(module).__name__} that has a __call__ of its own, expected that of nn.Module, which runs the "
            "rounds of gossip() in a forward pre-hook; let yours call super().__call__, or use "
            "GossipDataParallel(module)",
            stacklevel=3,
        )


def _check_names(state_dict: Mapping[str, Any], prefix: str, module: nn.Module) -> None:
    """Raise RuntimeError, as torch does for other keys that do not fit, where this is the state dict of a wrapper."""
    names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if any(prefix + name in state_dict for name in names):
        return
    if found := [name for name in names if f"{prefix}module.{name}" in state_dict]:
        raise RuntimeError(
            f"got the state dict of a wrapper, with the key '{prefix}module.{found[0]}', to load into a module of "
            f"gossip(), expected '{prefix}{found[0]}'; remove 'module.' from the keys with "
            "torch.nn.modules.utils.consume_prefix_in_state_dict_if_present(state_dict, 'module.')"
        )


def _with_gossip(plain: type[nn.Module]) -> type[GossipModule]:
    """The subclass of both, one for each class of modules."""
    if plain not in _classes:
        names = {name: getattr(plain, name) for name in ("__module__", "__qualname__", "__doc__")}
        _classes[plain] = type(plain.__name__, (GossipModule, plain), names)
    return _classes[plain]


def _plain(cls: type) -> type[nn.Module]:
    """The class of modules whose subclass with gossip is `cls`."""
    plain: type[nn.Module] = cls.__mro__[2]
    return plain


_become = vars(object)["__class__"].__set__  # whatever a class says of its `__class__`


def _blank(plain: type[nn.Module]) -> nn.Module:
    """A module of the class with gossip, without state."""
    return object.__new__(_with_gossip(plain))
