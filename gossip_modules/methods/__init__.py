"""The training methods by name, each an entry of one table: METHODS. A new one is a call of `register`.

`python -m gossip_modules.methods` prints the table.

>>> METHODS["choco"].title, METHODS["choco"].file
('CHOCO-SGD', 'gossip_modules/gossiper/choco.py')
"""

from ..registry import METHODS, Method, Paper, name_of, register
from .built_in import BUILT_IN
from .options import METHOD_OPTIONS, OPTION_GROUPS, Context, MethodOptions
from .own import gossiper_method
from .sparta_method import SPARTA_METHOD
from .usage import possible_options, unused_options, used_options, why_fixed_ranks, without_unused, wrap
from .wrapping import Wrapper

__all__ = [
    "METHODS",
    "METHOD_OPTIONS",
    "OPTION_GROUPS",
    "Context",
    "Method",
    "MethodOptions",
    "Paper",
    "Wrapper",
    "gossiper_method",
    "name_of",
    "possible_options",
    "register",
    "unused_options",
    "used_options",
    "why_fixed_ranks",
    "without_unused",
    "wrap",
]

for _method in (*BUILT_IN, SPARTA_METHOD):
    register(_method)
