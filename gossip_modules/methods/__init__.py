"""The training methods by name, each an entry of one table: METHODS. A new one is a call of `register`.

`python -m gossip_modules.methods` prints the table.

>>> METHODS["choco"].title, METHODS["choco"].text
('CHOCO-SGD', 'Choco(SignNorm(), step_size=0.45)')
"""

from ..registry import METHODS, Method, Paper, name_of
from .built_in import ADPSGD, BUILT_IN, MATCHA, SGP, WAGMA, A2CiD2, AllReduce, Dpwa, OverlapSGP
from .chosen import Chosen, read_algorithm, read_graph, read_schedule
from .options import WRAPPER_OPTIONS, Context, WrapperOptions, unused_options, without_unused
from .wrapping import Wrapper, entry, register, wrap

__all__ = [
    "ADPSGD",
    "MATCHA",
    "METHODS",
    "SGP",
    "WAGMA",
    "WRAPPER_OPTIONS",
    "A2CiD2",
    "AllReduce",
    "Chosen",
    "Context",
    "Dpwa",
    "Method",
    "OverlapSGP",
    "Paper",
    "Wrapper",
    "WrapperOptions",
    "entry",
    "name_of",
    "read_algorithm",
    "read_graph",
    "read_schedule",
    "register",
    "unused_options",
    "without_unused",
    "wrap",
]

for _method in BUILT_IN:
    register(_method)
