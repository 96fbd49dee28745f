"""What a user chooses to simulate: a method of the registry, a graph and a code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..graph_manager.named_graphs import NAMES
from ..registry import METHODS, name_of
from .gossip import SimulatedMethod
from .setting import Setting


class Choice(NamedTuple):
    """What a user chooses: a method, and a graph and a code where it has them; None = its own choice.

    >>> Choice.parse("choco:hypercube:topk")
    Choice(method='choco', graph='hypercube', compressor='topk')
    """

    method: str
    graph: str | None = None
    compressor: str | None = None

    @classmethod
    def parse(cls, text: str) -> Choice:
        """`method`, `method:graph` or `method:graph:code`; an empty graph is the method's own choice.

        Raises:
            ValueError: no such method, graph or code, or one that the method has not.
        """
        name, *rest = text.split(":")
        name = name_of(name)
        if name not in simulated_methods() or len(rest) > 2:
            raise ValueError(
                f"got method={text!r}, expected <method>[:<graph>[:<code>]] with a method of "
                f"{', '.join(simulated_methods())}; e.g. sgp, dpsgd:ring or choco:torus:topk"
            )
        graph, compressor = [*(part or None for part in rest), None, None][:2]
        method = METHODS[name]
        if graph is not None and (method.simulated_graph is None or graph not in NAMES):
            names = ", ".join(NAMES) if method.simulated_graph else "no graph for it"
            raise ValueError(f"got graph={graph!r} of {name}, expected {names}; e.g. dpsgd:ring")
        if compressor is not None and compressor not in method.codes:
            names = ", ".join(method.codes) or "no code for it"
            raise ValueError(f"got code={compressor!r} of {name}, expected {names}; e.g. choco:torus:topk")
        return cls(name, graph, compressor)

    def resolved(self, world_size: int, peers_per_itr: int | Mapping[int, int] | None = None) -> Choice:
        """With the method's own choices filled in, for so many peers per round; '' where it has no graph or code."""
        method = METHODS[self.method]
        own = method.simulated_graph
        graph = self.graph or (own(world_size, peers_per_itr or 1) if own is not None else "")
        return Choice(self.method, graph, self.compressor or next(iter(method.codes), ""))

    @property
    def text(self) -> str:
        """As `parse` reads it: 'choco:torus:topk'."""
        return ":".join([self.method, self.graph or "", self.compressor or ""]).rstrip(":")


def make_method(choice: Choice, setting: Setting) -> SimulatedMethod:
    """The method that was chosen, ready for its first forward.

    Raises:
        ValueError: the graph has no such size, or the method cannot work on it.
    """
    simulate = METHODS[choice.method].simulate
    assert simulate is not None, "Choice.parse refuses methods that cannot be simulated"
    method: SimulatedMethod = simulate(choice.resolved(setting.world_size, setting.peers_per_itr), setting)
    return method


def simulated_methods() -> list[str]:
    """The names of the methods that the simulator knows."""
    return [name for name, method in METHODS.items() if method.simulate is not None]
