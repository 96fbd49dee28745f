"""The entry of a gossiper that is not of this library: with it the gossiper is a recipe and a row of the simulator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..gossip.gossiper import Gossiper
from ..registry import Method, Paper
from ..simulate.choice import Choice
from ..simulate.clocks import SyncClock
from ..simulate.gossip import LockstepMethod, SimulatedMethod
from ..simulate.mixing import SimulatedMixing
from ..simulate.setting import Setting
from . import built_in, simulated
from .one_thread import GossiperRule, measured_message
from .options import MethodOptions
from .wrapping import wrap_gossiper


def gossiper_method(
    name: str,
    gossiper: Callable[[MethodOptions, int], Gossiper],
    *,
    algorithm: type[Gossiper],
    title: str = "",
    summary: str = "",
    paper: Paper | None = None,
    options: frozenset[str] = frozenset(),
    codes: tuple[str, ...] = (),
    is_static: bool = False,
) -> Method:
    """The entry of a gossiper for undirected graphs, to be given to `register`.

    The simulator runs the gossiper itself, a copy for each rank in one thread, on its small problem; the bytes of its
    messages are measured.

    Args:
        name: what a user types.
        gossiper: makes a new gossiper, given the options of the method and a seed.
        algorithm: its class.
        title: what tables and pictures call it; "": its name.
        summary: what it does, in one sentence; "": the first line of its docstring.
        paper: where it was published; None: nowhere.
        options: the names of the fields of `MethodOptions` that it uses, besides those of gossip in rounds.
        codes: the names of the compressors that it takes, its default first.
        is_static: whether it needs a graph that never changes.

    Example:
        >>> method = gossiper_method("half", lambda options, seed: HalfStep(), algorithm=HalfStep)
        >>> register(method)
    """

    def simulate(choice: Choice, setting: Setting) -> SimulatedMethod:
        chosen: dict[str, Any] = {"step_size": setting.step_size or 0.0}
        if choice.compressor:
            chosen["compressor"] = choice.compressor
        mixing = simulated.undirected(choice, setting, is_static=is_static)

        def make() -> Gossiper:
            return gossiper(MethodOptions(**chosen), setting.seed)

        message = measured_message(make, setting.num_parameters, setting.links)
        clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
        return LockstepMethod(GossiperRule(make, mixing), SimulatedMixing(mixing), setting.schedule, clock)

    return Method(
        name,
        title or name,
        summary or (algorithm.__doc__ or "").strip().partition("\n")[0],
        algorithm,
        make=wrap_gossiper(gossiper, is_static=is_static),
        simulate=simulate,
        paper=paper,
        example=f"GossipDataParallel(model, push_sum=False, gossiper={algorithm.__name__}())",
        graph="undirected, static" if is_static else "undirected",
        options=built_in.ROUNDS | {"overlap"} | options | ({"compressor"} if codes else set()),
        gossiper=gossiper,
        simulated_graph=simulated.static if is_static else simulated.pairs,
        codes=codes,
    )
