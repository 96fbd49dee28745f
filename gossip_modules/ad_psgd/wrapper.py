"""BilatGossipDataParallel: AD-PSGD, asynchronous pairwise averaging."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..engine.background import close_at_program_end
from ..engine.lockstep import LockstepEngine
from ..flat.distance import check_bound
from ..flat.nonfinite import check_policy
from ..flat.selection import Selection
from ..membership.membership import Membership
from ..mixing_manager.base import MixingManager
from ..old_names import takes_old_arguments
from ..rounds.mixer import GlobalAverage
from ..schedule import Schedule
from ..transport.process_group import DEFAULT_TIMEOUT
from ..wrappers.arguments import GraphLike, Links, MixingLike, as_schedule, as_timeout, group_of
from ..wrappers.base import GossipWrapper, close_when_collected
from ..wrappers.choices import PairChoices, choose_bipartite_mixing
from ..wrappers.composition import check_whole
from ..wrappers.participant import Participant, check_elastic, check_forward
from .engine import BilateralEngine

_EXAMPLE = "None or DynamicBipartiteCompleteGraph"
_DESCRIBED_SIZE = 8  # workers of a membership compare their graphs of so many ranks


class BilatGossipDataParallel(GossipWrapper):
    """AD-PSGD: pairs of ranks average while both go on training, and no rank ever waits for another.

    A training forward of rank i, and what its thread does meanwhile (y is the model that peers see):

        x = x + the corrections that have come since the last forward;  y = x
        if i is active (odd) and its last exchange is complete: send y to a passive peer j, then go on
        forward and backward at x; optimizer.step()

        in the thread of the passive j:  receive y_i, answer y_j
        both:  correction = (y of the other - own y) / 2

    So no gradient step is lost, and the sum over ranks has all steps. The optimizer is your own.

    Ranks take steps at their own pace; `Progress` counts the steps of all. Ranks should `close()` at about the same
    time. The end of a program without `close()` closes too, unless an exception has ended it.

    [Note: continuous momentum] With `continuous_momentum` each rank has a second model x', equal to x at first.
    Exchanges move x' further than x, and x moves towards x' between exchanges. Ranks on a badly connected graph then
    agree after about the square root of the number of exchanges. With each exchange of rank i, dt after its last one:

        c = x_j - x_i
        v = (1 - exp(-2 eta dt)) / 2 (x' - x);   x = x + v;  x' = x' - v
        x = x + c / 2;   x' = x' + alpha c
        in each gradient step:  x' moves as x

    So peers get the model before v, which training adds together with the correction. In the paper's Algorithm 1 both
    ranks add v first, and c is the difference of the models after it.

    eta and alpha follow from the graph: see `MomentumRates`. The time between two exchanges of a rank is taken as its
    mean, so it does not depend on the speed of links. The mean over ranks of (x + x') / 2 has all steps. Nabli,
    Belilovsky, Oyallon, "A2CiD2: Accelerating Asynchronous Communication in Decentralized Deep Learning", NeurIPS 2023,
    arXiv 2306.08289.

    Lian, Zhang, Zhang, Liu, "Asynchronous Decentralized Parallel Stochastic Gradient Descent", ICML 2018, arXiv
    1710.06952, Algorithm 1 and the bipartite protocol of its section 3. `BilateralEngine` in ad_psgd/engine.py shows a
    step as pseudo-code, `BilateralAverage` in ad_psgd/exchange.py an exchange.

    Args:
        module: the model, on its device. Its trained tensors become views of one flat vector.
        graph: a bipartite graph with one peer per round: a GraphManager, a class or function of the number of ranks, a
            name ("bipartite-exponential") or a networkx graph; None = pairs at exponential distances where the world is
            even, else every active rank meets every passive one in turn.
        mixing: the weights of a pair: a MixingManager, or a class or function of the graph; None = one half each.
        process_group: a Gloo group without other traffic; None = a new one over all ranks.
        device_mesh: as for `GossipDataParallel`.
        timeout: the limit of every wait on a peer, in seconds or as a timedelta. The death of a
            process is raised at the next step, without waiting for it. A `Membership` has its own.
        continuous_momentum: A2CiD2, see [Note: continuous momentum]. This takes one more vector beside the model, and
            needs pairs with equal weights.
        on_nonfinite: the reaction to infinities or NaN in the difference of two models. "raise": FloatingPointError at
            both of them, "spread": do not look. With "raise", `settle()` and `close()` also look at the rank's own
            model, changed since its last exchange.
        max_relative_distance: the largest distance of a peer's model from the own one, in units of the norm of the own
            one. From a model further away, or with infinities or NaN, the rank takes nothing, with a warning, while the
            peer may take its half; `comm_stats()` counts it as `num_refused/<peer>`. Averaged buffers have the same
            bound. None: all models are averaged. Not over a mailbox.
        init_sync: whether training starts from the parameters and buffers of rank 0; with a membership it always does.
        gossip_buffers: whether pairs average running statistics (BatchNorm) too, or each keeps its own; a sequence of
            names or patterns = those floating-point buffers in their place; see `Selection`.
        ignore: names of parameters and buffers to leave local, also at the start, such as "head.bias", or patterns,
            such as "adapter.*"; in addition to the module's `_ddp_params_and_buffers_to_ignore`.
        gossip_in_eval_mode: whether forwards in eval mode with grad enabled train as well, so that they ask a peer.
        rounds: when a rank asks a peer: see `GossipDataParallel`.
        membership: a `Membership`, where workers may die and join. `graph` and `mixing` are then functions of any size,
            and all workers begin with the model of the first worker. Over a mailbox, such as Membership("s3://..."),
            an active worker asks by an object, and neither end ever waits for the other: see `PairsByMail`.
        schedule: over a mailbox the number of steps from one request to the next, at least 2.

    Raises:
        FloatingPointError: (forward, `flush()`, `settle()`, `close()`) see `on_nonfinite`.
        ValueError: invalid arguments, or ranks with different models, graphs, mixing or options.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction, forward, `flush()`, collectives) a peer is late or has died; names
            it, also where another rank has found out.

    Example:
        >>> model = BilatGossipDataParallel(model)  # was: DistributedDataParallel(model)
        >>> for x, y in loader:
        ...     loss = criterion(model(x), y)  # adds the corrections of peers, then computes
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
    """

    @takes_old_arguments()
    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        graph: GraphLike | None = None,
        mixing: MixingLike | None = None,
        continuous_momentum: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        on_nonfinite: str = "raise",
        max_relative_distance: float | None = None,
        gossip_buffers: bool | Sequence[str] = True,
        ignore: Sequence[str] = (),
        gossip_in_eval_mode: bool = False,
        rounds: str = "forward",
        init_sync: bool = True,
        membership: Membership | None = None,
        schedule: Schedule | int = 1,
    ) -> None:
        process_group = group_of(process_group, device_mesh)
        flags: dict[str, Any] = {"gossip_in_eval_mode": gossip_in_eval_mode, "rounds": rounds}
        super().__init__(module, selection=Selection(gossip_buffers, ignore), **flags)
        local, timeout = self._local, as_timeout(timeout)
        if continuous_momentum and mixing is not None:
            raise ValueError(
                f"got mixing={mixing} with continuous_momentum=True, expected one of them: the rates of the momentum "
                "hold for pairs that average half and half; leave mixing out"
            )
        if membership is not None:
            given = {"group": process_group, "init_sync": init_sync, "timeout": timeout, "takes_mail": True}
            check_elastic(membership, graph=graph, mixing=mixing, example=f"graph={_EXAMPLE}", **given)

        def choose(world_size: int) -> MixingManager:
            is_alone = membership is not None and world_size == 1  # until the membership has a place for this worker
            own = (None, None) if is_alone else (graph, mixing)
            return choose_bipartite_mixing(*own, world_size=world_size)

        choices = PairChoices(graph, mixing, schedule=as_schedule(schedule))
        mailbox: Any = membership if membership is not None and membership.is_by_mail else None
        if mailbox is not None and continuous_momentum:
            raise ValueError(
                "got continuous_momentum=True with a mailbox, expected False: its rates are for exchanges without "
                "delay; leave it out"
            )
        if mailbox is not None and max_relative_distance is not None:
            raise ValueError(
                f"got max_relative_distance={max_relative_distance} with a mailbox, expected None: a worker that reads "
                "a model there has already given its own; leave it out"
            )
        if mailbox is None and choices.schedule != Schedule():
            raise ValueError(
                f"got schedule={choices.schedule}, expected a mailbox beside it: over connections a rank asks its next "
                "peer as soon as the last one has answered; leave schedule out"
            )
        if membership is not None:
            check_whole(module, what="a membership")
        weights: MixingManager
        if mailbox is not None:
            check_forward(local)
            weights, mixer = mailbox.world_of(local, choices)
            described = choose(_DESCRIBED_SIZE)
        elif membership is not None:
            local.world = Participant(local, membership, choose, example=_EXAMPLE)
            described, weights = choose(_DESCRIBED_SIZE), choose(1)
        else:
            links = Links(process_group, comm_device="cpu", backend="gloo", timeout=timeout)
            local.place = links.place
            described = weights = choose(local.place[1])
        options = {"graph": described.graph, "mixing": described, "on_nonfinite": check_policy(on_nonfinite)}
        options |= {"continuous_momentum": True} if continuous_momentum else {}
        options |= {} if max_relative_distance is None else {"max_relative_distance": max_relative_distance}
        options |= {"gossip_buffers, ignore": (local.selection.gossip_buffers, local.selection.ignore), **flags}
        local.description = {name: str(value) for name, value in options.items()}
        if mailbox is not None:
            local.description["schedule"] = str(choices.schedule)
            mixer.bind(weights, local.transport, local.world)
            lockstep = LockstepEngine(mixer, choices.schedule, on_nonfinite=on_nonfinite, world=local.world)
            self._start(lockstep, local.world.averager_of(lockstep.averager))
            return
        if membership is None:
            local.description["init_sync"] = str(init_sync)
            self._open(links, init_sync=init_sync)
        engine = BilateralEngine(
            weights,
            local.transport,
            local.buffer.vector,
            on_nonfinite=on_nonfinite,
            max_relative_distance=check_bound(max_relative_distance),
            has_momentum=continuous_momentum,
        )
        if membership is None:
            close_when_collected(self, engine)
            close_at_program_end(engine)
        self._start(engine, GlobalAverage(local.transport))

    def settle(self) -> None:
        """See `AveragingMixin`. Once no rank asks any more, all received corrections are applied.

        Until its next training forward a rank replies "not yet" to its peers. So its model stays as it is now, and all
        checkpoints are of one moment.
        """
        if isinstance(engine := self._local.engine, BilateralEngine):  # a copy has another one
            engine.raise_if_failed()  # at every call, unlike flush(): the others would wait in vain
        self.flush()
        self._check()
        self._wait_for_all("waiting until no rank asks")
        self._local.engine.withdraw()
        self.flush()
        self._wait_for_all("waiting until no rank answers")

    def close(self) -> None:
        """See `AveragingMixin`."""
        if not self._local.is_closed:
            super().close()
            self._check()

    def _check(self) -> None:
        """See `on_nonfinite`."""
        if isinstance(engine := self._local.engine, BilateralEngine):
            engine.check(self._local.vector)

    def _wait_for_all(self, what: str) -> None:
        self._local.averager.transport.all_reduce(torch.zeros(1, device="cpu"), what=what)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._local.engine.withdraw()  # an exchange with the old model would undo the load
        super()._load_from_state_dict(*args, **kwargs)
