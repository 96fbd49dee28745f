"""The methods and attributes of the wrappers of Stochastic Gradient Push, and what becomes of each."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..foreign.user_line import is_torch, levels_to_user

WORKING: Mapping[str, str] = {
    "transfer_params": "rounds run by themselves, so leave it out; with rounds='manual' write model.gossip_step()",
    "sync_comms": "write model.flush()",
    "block": "write torch.distributed.barrier()",
    "communicator_warmup": "connections are made in the constructor; leave the call out",
    "unbias": "parameters hold the de-biased estimate wherever your code sees them; leave the call out",
    "ps_numerator": "parameters hold the de-biased estimate wherever your code sees them; leave the call out",
    "is_ps_numerator": "parameters hold the de-biased estimate wherever your code sees them; it is always False",
    "ps_weight": 'read model.get_extra_state()["weight"]',
}
"""Methods and attributes that work, with a warning once; by name, with what to write, as a clause."""

MISSING: Mapping[str, str] = {
    "update_gossiper": "a graph has a schedule of its peers by round; pass "
    "graph=lambda n: NPeerDynamicDirectedExponentialGraph(n, peers_per_itr={0: 2, 3000: 1})",
    "update_lr": "your loop has the optimizer; set its learning rate, as a scheduler of torch.optim does",
    "enable_gossip": "write model.train(); the first training forward of each step starts a round",
    "disable_gossip": "write model.eval(), or `with model.no_sync():` around forwards that start no round",
    "gossip_enable": "write model.eval() and model.train()",
    "gossip_params": "read model.module.parameters(); what travels is a vector that they are views of",
    "gossip_ps_weight": 'read model.get_extra_state()["weight"]',
    "gossiping": "write model.flush(), after which nothing is in flight",
    "scatter": "a process has one device; start one process for each",
    "gather": "a process has one device; start one process for each",
    "parallel_apply": "a process has one device; start one process for each",
}
"""Attributes without a counterpart of the same meaning; by name, with what to do, as a clause."""


class OldMethods(nn.Module):
    """A base of a wrapper: the methods and attributes of Stochastic Gradient Push that have a meaning here."""

    def transfer_params(self, mix: bool = True) -> bool:
        """True; with `rounds="manual"` after `gossip_step()`, otherwise rounds run by themselves."""
        self._say("transfer_params")
        if getattr(self, "rounds", "") == "manual":
            step: Any = self.gossip_step
            step()
        return True

    def sync_comms(self) -> None:
        """`flush()`."""
        self._say("sync_comms")
        flush: Any = self.flush
        flush()

    def state_dict(self, *args: Any, finish_gossip: object = None, **kwargs: Any) -> Any:
        """As `nn.Module.state_dict`; `finish_gossip` changes nothing, as what is in flight is always applied."""
        if finish_gossip is not None:
            self._say(
                "state_dict(finish_gossip=...)", "write model.state_dict(), which always applies what is in flight"
            )
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

    def block(self) -> None:
        """Collective: wait until all ranks are here."""
        self._say("block")
        averager: Any = self._averager
        transport = averager.transport
        transport.all_reduce(torch.zeros(1, device=transport.device), what="block()")

    def communicator_warmup(self) -> None:
        """Nothing: the constructor makes all connections."""
        self._say("communicator_warmup")

    def unbias(self) -> None:
        """Nothing: parameters hold the de-biased estimate."""
        self._say("unbias")

    def ps_numerator(self) -> None:
        """Nothing: parameters hold the de-biased estimate outside of `optimizer.step()`."""
        self._say("ps_numerator")

    @property
    def is_ps_numerator(self) -> bool:
        """False."""
        self._say("is_ps_numerator")
        return False

    @property
    def ps_weight(self) -> Tensor:
        """The push-sum weight, float64 [1], a copy; 1 where there is none."""
        self._say("ps_weight")
        buffer: Any = getattr(self, "_buffer", None)
        return (
            torch.ones(1, dtype=torch.float64, device="cpu")
            if buffer is None
            else buffer.vector.push_sum_weight.clone()
        )

    def _say(self, name: str, remedy: str = "") -> None:
        """Warn of an old name, once for each wrapper; not where torch reads all attributes, as torch.jit.trace does."""
        if is_torch(sys._getframe(2)):
            return
        said = self.__dict__.setdefault("_said_old_names", set())
        if name not in said:
            said.add(name)
            text = f"got {type(self).__name__}.{name}, a name of Stochastic Gradient Push: {remedy or WORKING[name]}"
            warnings.warn(text, UserWarning, stacklevel=levels_to_user())
