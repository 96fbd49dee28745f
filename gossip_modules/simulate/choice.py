"""What a user chooses to simulate: a method of the registry, a graph and a code."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ..graph_manager.named_graphs import NAMES
from ..methods.chosen import read_algorithm
from ..registry import METHODS, Method, name_of

CODES: Mapping[str, str] = {
    "sign": "SignNorm()",
    "topk": "TopK(0.01)",
    "randomk": "RandomK(0.01)",
    "qsgd": "QSGD(8)",
    "bfloat16": "Cast(bfloat16)",
    "float16": "Cast(float16)",
}
"""Short names of compressors, and their text."""


class Choice(NamedTuple):
    """What a user chooses: a method, and a graph and a code where it has them; None = its own choice.

    `algorithm` is the text with the method's settings, as `--algorithm` of the training scripts takes it; "": the
    recipe of the method.

    >>> Choice.parse("choco:hypercube:topk")
    Choice(method='choco', graph='hypercube', compressor='topk', algorithm='')
    >>> Choice.parse("GASLoC(sync_every=50):ring")
    Choice(method='gasloc', graph='ring', compressor=None, algorithm='GASLoC(sync_every=50)')
    """

    method: str
    graph: str | None = None
    compressor: str | None = None
    algorithm: str = ""

    @classmethod
    def parse(cls, text: str) -> Choice:
        """`method`, `method:graph` or `method:graph:code`; an empty graph is the method's own choice.

        In place of the name of a method there may be the text of an algorithm, which names its code itself.

        Raises:
            ValueError: no such method, graph or code, or one that the method has not.
        """
        head, bracket, tail = text.rpartition(")")
        first, *rest = (tail if bracket else text).split(":")
        algorithm = head + bracket
        name = read_algorithm(algorithm).method.name if algorithm else name_of(first)
        if name not in METHODS or len(rest) > (1 if algorithm else 2) or (algorithm and first):
            raise ValueError(
                f"got method={text!r}, expected <method>[:<graph>[:<code>]] with a method of {', '.join(METHODS)}, or "
                "<algorithm>[:<graph>]; e.g. sgp, dpsgd:ring, choco:torus:topk or 'DiLoCo(sync_every=50)'"
            )
        graph, compressor = [*(part or None for part in rest), None, None][:2]
        method = METHODS[name]
        if graph is not None and (method.simulated_graph is None or graph not in NAMES):
            names = ", ".join(NAMES) if method.simulated_graph else "no graph for it"
            raise ValueError(f"got graph={graph!r} of {name}, expected {names}; e.g. dpsgd:ring")
        if compressor is not None and compressor not in codes_of(method):
            names = ", ".join(codes_of(method)) or "no code for it"
            raise ValueError(f"got code={compressor!r} of {name}, expected {names}; e.g. choco:torus:topk")
        return cls(name, graph, compressor, algorithm)

    def resolved(self, world_size: int, peers_per_itr: int | Mapping[int, int] | None = None) -> Choice:
        """With the method's own choices filled in, for so many peers per round; '' where it has no graph or code."""
        method = METHODS[self.method]
        own = method.simulated_graph
        graph = self.graph or (own(world_size, peers_per_itr or 1) if own is not None else "")
        code = "" if self.algorithm else self.compressor or next(iter(codes_of(method)), "")
        return self._replace(graph=graph, compressor=code)


def codes_of(method: Method) -> tuple[str, ...]:
    """The short names of the compressors that a method takes, its own first."""
    return tuple(CODES) if method.step_sizes else ()
