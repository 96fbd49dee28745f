"""Which method and graph to train with: predicted by training n small models by each method on a model of your network.

From the command line: `python -m gossip_modules.simulate`. From Python:

>>> setting = Setting(8, 11_200_000, ComputeModel(seconds=0.15, overhead_seconds=0.01), LinkModel(rate_bit_s=1e9))
>>> prediction = simulate("sgp", setting, Consensus())
>>> prediction.num_steps, round(prediction.step_seconds, 2)  # log2(8) rounds of the exponential graph are exact
(3.0, 0.55)
"""

from ..consensus_control import ConsensusControl
from ..schedule import Schedule
from .advice import Advice, Prediction, advise, best
from .choice import Choice
from .delays import ComputeModel, LinkModel
from .problems import Consensus, Digits, Problem
from .run import simulate
from .setting import ControlRates, Setting
from .tuning import tune

__all__ = [
    "Advice",
    "Choice",
    "ComputeModel",
    "Consensus",
    "ConsensusControl",
    "ControlRates",
    "Digits",
    "LinkModel",
    "Prediction",
    "Problem",
    "Schedule",
    "Setting",
    "advise",
    "best",
    "simulate",
    "tune",
]
