"""The gossip of models in lockstep, in the module where Stochastic Gradient Push has it."""

from .compat.sgp import BilatPushPull as BilatPushPull
from .compat.sgp import Gossiper as Gossiper
from .compat.sgp import PushPull as PushPull
from .compat.sgp import PushSum as PushSum
