"""The entry of a gossiper in one call, such as one of your own: it is a recipe then, and a row of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ..registry import Method, Paper
from ..rounds.gossiper import Gossiper
from ..simulate.choice import Choice
from ..simulate.clocks import SyncClock
from ..simulate.gossip import LockstepMethod, SimulatedMethod, options_in
from ..simulate.setting import Setting
from .controlled_simulation import schedule_of
from .entries import entry
from .one_thread import OneThread, measured_message, pair
from .simulated import options_of, pairs, static, undirected
from .simulated_options import MethodOptions


def gossiper_method(
    name: str,
    gossiper: Callable[[MethodOptions, int], Gossiper],
    *,
    algorithm: type[Gossiper],
    title: str = "",
    summary: str = "",
    paper: Paper | None = None,
    is_static: bool = False,
) -> Method:
    """The entry of a gossiper for undirected graphs, to be given to `register`: a recipe and a row of the simulator.

    Args:
        name, algorithm, paper: see `Method`.
        gossiper: makes a new gossiper for the simulator, given options and a seed.
        title: what tables and pictures call it; "": its name.
        summary: what it does, in one sentence; "": the first line of the docstring of `algorithm`.
        is_static: whether it needs a graph that never changes.
    """
    facts: dict[str, Any] = {
        key: value for key, value in {"title": title, "summary": summary, "paper": paper}.items() if value
    }
    return entry(
        algorithm,
        name=name,
        simulate=partial(simulate_gossiper, gossiper, is_static=is_static),
        gossiper=gossiper,
        simulated_graph=static if is_static else pairs,
        **facts,
    )


def simulate_gossiper(
    gossiper: Callable[[MethodOptions, int], Gossiper], choice: Choice, setting: Setting, *, is_static: bool
) -> SimulatedMethod:
    """The gossiper itself, a copy for each rank in one thread; the bytes of its messages are measured.

    Args:
        gossiper: makes a new one, given options and a seed.
        choice, setting: what is simulated.
        is_static: whether it needs a graph that never changes.
    """
    options, schedule = options_of(choice, setting), schedule_of(choice.method, setting)

    def make() -> Gossiper:
        return gossiper(options, setting.seed)

    message = measured_message(OneThread(make, pair()), setting.num_parameters, setting.links)
    clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
    driver = OneThread(make, undirected(choice, setting, is_static=is_static))
    return LockstepMethod(driver, schedule, clock, options=options_in(driver.gossipers[0]))
