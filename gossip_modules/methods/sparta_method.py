"""How SPARTA is simulated."""

from __future__ import annotations

from torch import Tensor

from ..algorithms.sparta import Sparta
from ..rounds.rows import Rows, StackedMixing
from ..simulate.choice import Choice
from ..simulate.clocks import SyncClock
from ..simulate.codes import coded_message
from ..simulate.gossip import Rule, RuleMethod, SimulatedMethod
from ..simulate.setting import Setting
from .controlled_simulation import schedule_of
from .simulated import options_of, undirected
from .simulated_options import MethodOptions


def sparta(options: MethodOptions, seed: int) -> Sparta:
    """SPARTA."""
    return Sparta(options.compression_ratio, seed=seed)


class SpartaRule(Rule):
    """See `Sparta`: all ranks at once, as n ranks that talk to all others send n^2 messages.

    Args:
        gossiper: the settings.
    """

    def __init__(self, gossiper: Sparta) -> None:
        self.compressor = gossiper.compressor

    def correction(self, x: Tensor, round_: Rows, t: int) -> Tensor:
        """See `Rule`."""
        result = self.compressor.decompressed(x, t=t)
        columns = result.any(dim=0).nonzero().flatten()
        said = result.index_select(1, columns)
        return result.index_copy_(1, columns, round_.mix(said).sub_(said))


def simulate_sparta(choice: Choice, setting: Setting) -> SimulatedMethod:
    """SPARTA."""
    options, schedule = options_of(choice, setting), schedule_of(choice.method, setting)
    mixing = undirected(choice, setting)
    gossiper = Sparta(options.compression_ratio, seed=setting.seed)
    message = coded_message(gossiper.compressor, setting.num_parameters, setting.links)
    clock = SyncClock(setting.compute, setting.network, message, model_bytes=setting.model_bytes)
    return RuleMethod(SpartaRule(gossiper), StackedMixing(mixing), schedule, clock)
