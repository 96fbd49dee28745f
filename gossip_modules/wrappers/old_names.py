"""The methods and attributes of other wrappers, and what becomes of each: they work, or an error says what to write."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..old_calls import is_torch, levels_to_user

MISSING: Mapping[str, str] = {
    "update_gossiper": "a graph has a schedule of its peers by round; pass "
    "graph=lambda n: NPeerDynamicDirectedExponentialGraph(n, peers_per_itr={0: 2, 3000: 1})",
    "update_lr": "your loop has the optimizer; set its learning rate, as a scheduler of torch.optim does",
    "enable_gossip": "write model.train(); the first training forward of each step starts a round",
    "disable_gossip": "write model.eval(), or `with model.no_sync():` around forwards that start no round",
    "gossip_enable": "write model.eval() and model.train()",
    "gossip_params": "read model.module.parameters(); ranks exchange a vector that they are views of",
    "gossip_ps_weight": 'read model.get_extra_state()["weight"]',
    "gossiping": "write model.flush(), after which nothing is in flight",
    "scatter": "a process has one device; start one process for each",
    "gather": "a process has one device; start one process for each",
    "parallel_apply": "a process has one device; start one process for each",
}
"""Attributes without a counterpart of the same meaning; by name, with what to do, as a clause."""


class OldName:
    """A method or attribute of Stochastic Gradient Push that works here, with a warning, once for each wrapper.

    Args:
        get: its value, for a wrapper.
        remedy: the line to write instead, as a clause.
    """

    def __init__(self, get: Callable[[Any], Any], remedy: str) -> None:
        self._get, self.remedy = get, remedy

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, wrapper: Any, owner: type) -> Any:
        if wrapper is None:
            return self
        if not is_torch(sys._getframe(1)):  # torch.jit.trace reads all attributes
            _warn_once(wrapper, self._name, self.remedy)
        return self._get(wrapper)


def _warn_once(wrapper: Any, name: str, remedy: str) -> None:
    said = wrapper.__dict__.setdefault("_said_old_names", set())
    if name not in said:
        said.add(name)
        text = f"got {type(wrapper).__name__}.{name}, a name of Stochastic Gradient Push: {remedy}"
        warnings.warn(text, UserWarning, stacklevel=levels_to_user())


def _transfer_params(wrapper: Any) -> Callable[..., bool]:
    def transfer_params(mix: bool = True) -> bool:
        if getattr(wrapper, "rounds", "") == "manual":
            wrapper.gossip_step()
        return True

    return transfer_params


def _block(wrapper: Any) -> Callable[[], None]:
    transport = wrapper._averager.transport
    return lambda: transport.all_reduce(torch.zeros(1, device=transport.device), what="block()")


def _push_sum_weight(wrapper: Any) -> Tensor:
    """The push-sum weight, float64 [1], a copy; 1 where there is none."""
    buffer = getattr(wrapper, "_buffer", None)
    if buffer is None:
        return torch.ones(1, dtype=torch.float64, device="cpu")
    weight: Tensor = buffer.vector.push_sum_weight
    return weight.clone()


def _nothing(wrapper: Any) -> Callable[[], None]:
    return lambda: None


_ESTIMATE = "parameters hold the de-biased estimate wherever your code sees them"


class OldNames(nn.Module):
    """A base of a wrapper: names of other wrappers, which work with a warning, or whose error tells the remedy.

    `hasattr` is False for an attribute that is an error. An attribute that only the wrapped module has is named too.
    """

    _foreign_attributes: ClassVar[Mapping[str, str]] = {}
    """What takes the place of an attribute, as a clause, by its name; a subclass extends the table of its base."""

    transfer_params = OldName(
        _transfer_params,
        "rounds run by themselves, so leave it out; with rounds='manual' write model.gossip_step()",
    )
    sync_comms = OldName(lambda wrapper: wrapper.flush, "write model.flush()")
    block = OldName(_block, "write torch.distributed.barrier()")
    communicator_warmup = OldName(_nothing, "connections are made in the constructor; leave the call out")
    unbias = OldName(_nothing, f"{_ESTIMATE}; leave the call out")
    ps_numerator = OldName(_nothing, f"{_ESTIMATE}; leave the call out")
    is_ps_numerator = OldName(lambda wrapper: False, f"{_ESTIMATE}; it is always False")
    ps_weight = OldName(_push_sum_weight, 'read model.get_extra_state()["weight"]')

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_modules", _NONE).get("module")  # None before the constructor has set it
        if name == "module" and module is not None:  # in every forward
            return module
        try:
            return super().__getattr__(name)
        except AttributeError as error:
            remedy = self._foreign_attributes.get(name)
            if remedy is None and module is not None and not name.startswith("_") and hasattr(module, name):
                remedy = f"the module in it has; write model.module.{name}"
            if remedy is None:
                raise
            raise AttributeError(f"{error}: {remedy}", name=name, obj=self) from None

    def state_dict(self, *args: Any, finish_gossip: object = None, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`; `finish_gossip` changes nothing, as corrections in flight are always applied."""
        if finish_gossip is not None:
            remedy = "write model.state_dict(), which always applies what is in flight"
            _warn_once(self, "state_dict(finish_gossip=...)", remedy)
        return super().state_dict(*args, **kwargs)

    def load_state_dict(self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module.load_state_dict`.

        Raises:
            ValueError: it is the checkpoint of Stochastic Gradient Push, which has a state dict inside.
        """
        if {"state_dict", "ps_weight"} <= set(state_dict):
            raise ValueError(
                f"got a checkpoint of Stochastic Gradient Push to load into a {type(self).__name__}, expected its "
                'state dict; write model.load_state_dict(checkpoint["state_dict"]), with parameters divided by '
                'checkpoint["ps_weight"] where checkpoint["is_ps_numerator"] is true'
            )
        return super().load_state_dict(state_dict, *args, **kwargs)


_NONE: Mapping[str, Any] = {}
WORKING: Mapping[str, str] = {name: old.remedy for name, old in vars(OldNames).items() if isinstance(old, OldName)}
"""The names of Stochastic Gradient Push that work; each with the line to write, as a clause."""
