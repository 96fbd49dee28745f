"""The Lab: many workers in one process, with a model of your own, a clock, links, deaths and joining workers.

`compare` trains your model by the algorithms that train under torchrun. `simulate`, `tune` and `advise` predict which
method suits a cluster; from the command line: `python -m gossip_modules.lab`.

>>> setting = Setting(8, 11_200_000, Compute(seconds=0.15, overhead_seconds=0.01), Network("1 Gbit/s"))
>>> prediction = simulate("sgp", setting, Consensus())
>>> prediction.num_steps, round(prediction.step_seconds, 2)  # log2(8) rounds of the exponential graph are exact
(3.0, 0.55)
"""

from .clock import Compute, LinkSpec, Network
from .comparison import Result, compare
from .events import LabJoin as Join
from .events import LabKill as Kill
from .mail_training import Mailbox
from .plan import LabPlan, Setting
from .planner import Advice, Prediction, advise, best, simulate, tune
from .tasks import Consensus, Digits, LabTask, Problem, Quadratics

__all__ = [
    "Advice",
    "Compute",
    "Consensus",
    "Digits",
    "Join",
    "Kill",
    "LabPlan",
    "LabTask",
    "LinkSpec",
    "Mailbox",
    "Network",
    "Prediction",
    "Problem",
    "Quadratics",
    "Result",
    "Setting",
    "advise",
    "best",
    "compare",
    "simulate",
    "tune",
]
