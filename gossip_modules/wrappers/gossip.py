"""GossipDataParallel: SGP, Overlap SGP and D-PSGD as a wrapper like DistributedDataParallel."""

from __future__ import annotations

import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from ..engine.lockstep import LockstepEngine
from ..engine.measuring import Measurement, OverlapChoice, OverlapLimits
from ..engine.overlap import Overlap
from ..flat.distance import check_bound
from ..flat.nonfinite import check_policy
from ..flat.selection import Selection
from ..flat.sharded import meshes_of
from ..membership.membership import Membership
from ..mixing_manager.base import MixingManager
from ..old_names import takes_old_arguments
from ..rounds.mixer import Mixer
from ..rounds.rounds import Rounds
from ..rounds.vector import widened
from ..schedule import Schedule
from ..transport.connect import connect
from ..transport.exchange import fail
from ..transport.process_group import DEFAULT_TIMEOUT, ProcessGroupTransport
from .arguments import GraphLike, Links, MixingLike, as_schedule, as_timeout, as_whole, check_overlap, group_of
from .base import GossipWrapper
from .choices import AlgorithmLike, Choices, as_algorithm, wire_limit
from .composition import check_sharding
from .node import MemberNode, Node, check_node_size, count_nodes, make_node, meet_node
from .participant import Participant, check_elastic, check_forward
from .replica import meet_replica


class GossipDataParallel(GossipWrapper, Joinable):
    """Data-parallel training by gossip: ranks average their models with a few peers, where DDP averages with all.

    `help()` prints this text and every method of `nn.Module`. Read the methods `averaged` and `averaged_state_dict`
    (the average of all ranks), `settle` and `flush` (apply all corrections), `no_sync`, `consensus_distance`,
    `comm_stats` and `close`.

    Round t of rank i, at the first training forward of an optimizer step (z is what the module computes with, w the
    push-sum weight, 1 at the start):

        x = w z
        send x and w to graph.out_peers(i, t)
        receive x_j and w_j from each j of graph.in_peers(i, t)
        x, w = sum_j W_ij(t) x_j, sum_j W_ij(t) w_j        # j = i included
        z = x / w                                          # the de-biased estimate; x itself in D-PSGD, where w is 1
        forward and backward at z; then optimizer.step() on x

    One optimizer step is one round, of the same number on all ranks; the optimizer and the loop are the user's own.

    | method       | arguments                                                     |
    |--------------|---------------------------------------------------------------|
    | SGP          | (the defaults)                                                |
    | Overlap SGP  | overlap=True, and max_staleness=tau - 1 for tau > 1; "auto"   |
    | D-PSGD       | push_sum=False                                                |
    | Gossip-PGA   | schedule=Schedule(average_every=H)                            |
    | Local SGD    | algorithm=LocalSGD(sync_every=H)                              |
    | MATCHA       | graph=MatchaGraph(base, budget=0.5)                           |
    | PowerGossip  | algorithm=PowerGossip(), or Choco, DeepSqueeze, Moniqua       |
    | running sums | algorithm=RunningSums(): SGP over links that lose messages    |
    | DiLoCo       | algorithm=DiLoCo(), or MuLoCo, IsoLoCo, SparseLoCo, SlowMo,   |
    |              | NoLoCo, GASLoC                                                |
    | D2           | algorithm=D2(), or ExactDiffusion, EXTRA, GradientTracking,   |
    |              | KGT, ProxSkip, QGDSGDm, DecentLaM                             |

    Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019, arXiv 1811.10792, Algorithms 1
    and 2; Lian et al., "Can Decentralized Algorithms Outperform Centralized Algorithms?", NeurIPS 2017, arXiv
    1705.09056, Algorithm 1.

    Args:
        module: the model, on its device. Its trained tensors become views of one flat vector; values are kept, or
            come from rank 0.
        graph: the communication graph: a GraphManager; a class or function of the number of ranks, like `RingGraph`;
            a name, like "ring"; or a networkx graph. None = one-peer exponential (SGP), pairs or a ring (D-PSGD).
        mixing: the weights W(t): a MixingManager, or a class or function of the graph; None = uniform (SGP),
            Metropolis-Hastings (D-PSGD), the Laplacian of a `MatchaGraph`.
        push_sum: whether the weight w is sent too (SGP, any directed graph) or not (D-PSGD).
        overlap: whether a round runs in a thread under the next forward and backward, instead of before it. Costs a
            further copy of the model. "auto": the first eight rounds block and are measured, then all ranks choose
            overlap, and a staleness of at most `max_staleness`; see `overlap_choice`, and [Note: overlap="auto"] of
            `Measurement`. Not for algorithms without overlap, outer methods (use delay="auto") or a membership.
        max_staleness: the number of forwards before training waits for a late overlapped round; rounds then start every
            max_staleness + 1 steps. An algorithm with `sync_every` keeps its steps; a late round then ends at the
            latest when the next one begins.
        algorithm: the method of a round: an `Algorithm`, such as `D2()`, or one over another, such as
            `GASLoC(momentum=0).over(Choco(...))`; its class or its name, "d2"; None = plain gossip: SGP or D-PSGD, as
            `push_sum` says.
        wire_dtype: torch.bfloat16, torch.float16 or torch.int8: messages are rounded to it, parameters are not; see
            `PushPull`. "auto", with overlap="auto": ranks choose bfloat16 if the bytes of a round take longer than the
            rest of a step.
        deltas: whether a link carries the changes of the rounded numbers since its last message. Results are
            equal, bit by bit. For plain gossip with a `wire_dtype` of 16 bits; each link keeps its last message, see
            `Deltas`.
        max_relative_distance: the largest distance of a peer's model from the own one, in units of the norm of the own
            one. A model further away, or with infinities or NaN, is left out, with a warning; `comm_stats()` counts
            it as `num_refused/<peer>`. For plain gossip without exact averages; None: all are mixed. See [Note: refused
            messages] of `PushPull`.
        schedule: the steps with gossip and with global averages; a number k = gossip at every k-th step.
        process_group: a group without other traffic; None = a new one over all ranks.
        device_mesh: in place of `process_group`, the dimension of a mesh for gossip between replicas, such as
            mesh["replicate"]. A replica may be sharded over the other dimensions, by `fully_shard` or a plan of
            DTensors, see `ShardedReplica`. Not with a membership.
        nprocs_per_node: the number of consecutive ranks of a node, with one model; see `Node`. With a membership: of
            processes that are one worker, all of torch.distributed or of `process_group`; the first one gossips for
            all, by any method for memberships, and only its `state_dict()` has the whole state of the node.
        comm_device: "cpu" sends GPU parameters through pinned memory; None = the GPU if the group has NCCL or XCCL.
        init_sync: whether all ranks start from the parameters and buffers of rank 0; with a membership they always do.
        gossip_buffers: whether running statistics (BatchNorm) are averaged like parameters; a sequence of names or
            patterns = those floating-point buffers in their place. An averaged model has the other buffers of rank 0,
            see `Selection`.
        ignore: names of parameters and buffers to leave local, also at the start, such as "head.bias", or patterns,
            such as "adapter.*"; in addition to the module's `_ddp_params_and_buffers_to_ignore`.
        gossip_in_eval_mode: whether a forward in eval mode with grad enabled is a training forward and starts a round:
            for training with frozen BatchNorm statistics.
        rounds: when rounds run. "forward": before the first training forward of each optimizer step, see [Note: One
            step is one round] of `Loop`. "step": after each step of the torch optimizer of the parameters. "manual": in
            `gossip_step()` only.
        on_nonfinite: the reaction to infinities and NaN. Gossip would spread them to all ranks in a few rounds.
            "raise": FloatingPointError at the rank with them, before others get them (with overlap, also at their
            receivers, before they are applied). "spread": do not look.
        find_unused_parameters: as for DistributedDataParallel; for `nprocs_per_node > 1`.
        timeout: the limit of every wait; a number = seconds. A `Membership` has its own.
        membership: a `Membership`, where workers may die and join: `graph` and `mixing` are functions of the size then.
            The processes of a sharded module are one worker, see `ReplicaProcesses`.
    Other arguments of DistributedDataParallel give a warning if they change nothing, and an error with their
    replacement otherwise.

    Raises:
        ValueError: invalid arguments, or ranks with different models, graphs, mixing or options.
        RuntimeError: torch.distributed is not initialised.
        TimeoutError, ConnectionError: (construction, forward, `flush()`) a peer is late or gone; names it.
        FloatingPointError: (forward, `flush()`) see `on_nonfinite`.

    Example:
        >>> model = GossipDataParallel(model)  # was: DistributedDataParallel(model)
        >>> for x, y in loader:
        ...     loss = criterion(model(x), y)  # gossips, then computes
        ...     optimizer.zero_grad()
        ...     loss.backward()
        ...     optimizer.step()
        >>> with model.averaged():
        ...     evaluate(model)
    """

    _graph: str | None = None  # that rounds are on; None with a membership, where it follows the number of workers
    _others: ProcessGroupTransport | None = None  # of `Join`; made in the first step inside it

    @takes_old_arguments()
    def __init__(
        self,
        module: nn.Module,
        *,
        graph: GraphLike | None = None,
        mixing: MixingLike | None = None,
        push_sum: bool = True,
        overlap: bool | str = False,
        max_staleness: int = 0,
        algorithm: AlgorithmLike = None,
        wire_dtype: torch.dtype | str | None = None,
        deltas: bool = False,
        max_relative_distance: float | None = None,
        schedule: Schedule | int = 1,
        process_group: dist.ProcessGroup | None = None,
        device_mesh: dist.DeviceMesh | None = None,
        nprocs_per_node: int = 1,
        comm_device: torch.device | str | None = None,
        init_sync: bool = True,
        gossip_buffers: bool | Sequence[str] = True,
        ignore: Sequence[str] = (),
        gossip_in_eval_mode: bool = False,
        rounds: str = "forward",
        on_nonfinite: str = "raise",
        find_unused_parameters: bool = False,
        timeout: timedelta | float = DEFAULT_TIMEOUT,
        membership: Membership | None = None,
    ) -> None:
        check_overlap(overlap, max_staleness)
        g = max(as_whole(nprocs_per_node, name="nprocs_per_node"), 1)  # less is refused below
        flags: dict[str, Any] = {"gossip_in_eval_mode": gossip_in_eval_mode, "rounds": rounds}
        super().__init__(module, selection=Selection(gossip_buffers, ignore), num_shards=g, **flags)
        Joinable.__init__(self)
        self._overlap, self._max_staleness, self._on_nonfinite = overlap, max_staleness, check_policy(on_nonfinite)
        self._wire_limit, wire = wire_limit(wire_dtype, overlap)
        chosen = Choices(
            graph=graph,
            mixing=mixing,
            push_sum=push_sum,
            algorithm=as_algorithm(algorithm),
            wire_dtype=wire,
            schedule=as_schedule(schedule),
            deltas=deltas,
            max_relative_distance=check_bound(max_relative_distance),
        )
        self._needs_tokens = rounds == "step" and getattr(chosen.algorithm, "counts_tokens", False)
        self._has_counted = False  # the tokens of the present step
        if overlap == "auto":
            chosen.check_auto(self._wire_limit, has_membership=membership is not None)
        links = Links(group_of(process_group, device_mesh), comm_device=comm_device, timeout=as_timeout(timeout))
        check_node_size(nprocs_per_node, find_unused_parameters=find_unused_parameters)
        enter = self._enter_world if membership is None else partial(self._enter_membership, membership)
        mixing, mixer = enter(chosen, links, g, init_sync=init_sync)
        is_sharded = membership is not None and self._local.buffer.is_sharded
        try:
            if g > 1 or is_sharded:
                node = self._make_node(links, g, find_unused_parameters=find_unused_parameters)
                node.has_codes = is_sharded and chosen.algorithm is not None
                self._local.share_with(node)
            self._begin(mixer, mixing, chosen.schedule)
        except BaseException:
            if self._local.node is not None:
                self._local.node.close()
            raise

    def _enter_world(self, chosen: Choices, links: Links, g: int, *, init_sync: bool) -> tuple[MixingManager, Mixer]:
        """Take part in a fixed world of ranks; g: the processes of a node."""
        self._local.place, num_nodes = links.place, count_nodes(links, g)
        is_sharded = self._local.buffer.is_sharded
        chosen.check(overlap=self._overlap, init_sync=init_sync, nprocs_per_node=g, is_sharded=is_sharded)
        mixer = chosen.mixer()
        mixing = chosen.weights(num_nodes)
        self._graph = str(mixing.graph)
        options: dict[str, object] = {"init_sync": init_sync, "nprocs_per_node": g, "comm_device": links.comm_device}
        self._describe(chosen, mixing, mixer, **options)
        self._open(links, init_sync=init_sync, ranks=Node.peers(g))
        if self._local.node is not None:
            self._local.node.has_codes = chosen.algorithm is not None
        return mixing, mixer

    def _enter_membership(
        self, membership: Membership, chosen: Choices, links: Links, g: int, *, init_sync: bool
    ) -> tuple[MixingManager, Mixer]:
        """Take part in a membership; g: the processes of this worker."""
        if isinstance(membership, Membership) and membership.is_by_mail:
            return self._enter_mailbox(membership, chosen, links, g, init_sync=init_sync)
        group = links.process_group if g == 1 else None  # else it connects the processes of the node
        given: dict[str, Any] = {"group": group, "comm_device": links.comm_device, "timeout": links.timeout}
        check_elastic(membership, graph=chosen.graph, mixing=chosen.mixing, init_sync=init_sync, **given)
        is_sharded = check_sharding(self.module, group, has_membership=True)
        if is_sharded and g > 1:
            raise ValueError(
                f"got nprocs_per_node={g} with a module that is sharded over processes, expected 1: the processes that "
                "hold its shards are one worker; leave nprocs_per_node out"
            )
        # One process gossips for a node.
        place: dict[str, Any] = {"nprocs_per_node": 1, "is_sharded": is_sharded, "has_membership": True}
        chosen.check(overlap=self._overlap, init_sync=init_sync, **place)
        chosen = chosen.for_membership()
        mixer, choose = chosen.mixer(), chosen.for_any_size()
        self._local.world = Participant(self._local, membership, choose, check=mixer.check)
        processes = {"shards": [tuple(mesh.shape) for mesh in meshes_of(self.module)]} if is_sharded else {}
        self._describe(chosen, choose(8), mixer, **(processes if g == 1 else {"nprocs_per_node": g}))
        return choose(1), mixer

    def _enter_mailbox(
        self, membership: Any, chosen: Choices, links: Links, g: int, *, init_sync: bool
    ) -> tuple[MixingManager, Mixer]:
        """Take part in a run over a mailbox."""
        given: dict[str, tuple[object, object]] = {
            "overlap": (self._overlap, False),
            "nprocs_per_node": (g, 1),
            "max_relative_distance": (chosen.max_relative_distance, None),
        }
        if unfit := [f"{name}={value}" for name, (value, default) in given.items() if value != default]:
            raise ValueError(
                f"got {', '.join(unfit)} with a mailbox, expected none of them: one process is one worker, and rounds "
                "that take long go on under training by themselves; leave them out"
            )
        place: dict[str, Any] = {"group": links.process_group, "comm_device": links.comm_device}
        place |= {"timeout": links.timeout, "init_sync": init_sync, "takes_mail": True}
        check_elastic(membership, graph=chosen.graph, mixing=chosen.mixing, **place)
        check_forward(self._local)
        chosen.check(overlap=False, init_sync=True, nprocs_per_node=1, has_membership=True)
        mixing, mixer = membership.world_of(self._local, chosen)
        self._describe(chosen, chosen.for_any_size()(8), mixer)
        return mixing, mixer

    def _describe(self, chosen: Choices, mixing: MixingManager, mixer: Mixer, **options: object) -> None:
        """Note what the ranks must agree on, by name."""
        self._was_on_a_ring = chosen.was_on_a_ring(mixing)
        layout = widened(self._local.buffer.vector.layout, has_buffers=False)
        what = {
            "graph": mixing.graph,
            "mixing": mixing,
            "algorithm": mixer.describe([segment.dtype for segment in layout.segments if segment.numel]),
            **options,
            "schedule": chosen.schedule,
            "overlap": self._overlap,
            "max_staleness": self._max_staleness,
            **({} if self._wire_limit is None else {"wire_dtype": "auto"}),
            "gossip_buffers": self._local.selection.gossip_buffers,
            **({"ignore": ignored} if (ignored := self._local.selection.ignore) else {}),
            "gossip_in_eval_mode": self.gossip_in_eval_mode,
            "on_nonfinite": self._on_nonfinite,
        }
        self._local.description = {name: str(value) for name, value in what.items()}

    def _make_node(self, links: Links, g: int, *, find_unused_parameters: bool) -> Node:
        options: dict[str, Any] = {
            "selection": self._local.selection,
            "find_unused_parameters": find_unused_parameters,
        }
        local, world = self._local, self._local.world
        if not isinstance(world, Participant):
            return make_node(self.module, links, g, **options)
        device, what = local.buffer.vector.raw.device, world.describe()
        if local.buffer.is_sharded:
            return meet_replica(self.module, links, world.membership, description=self._local.description)
        processes = meet_node(world.membership, links, g, description=what, device=device)
        return MemberNode(self.module, processes, **options)

    def _begin(self, mixer: Mixer, mixing: MixingManager, schedule: Schedule) -> None:
        """Be ready for the first step."""
        local, node = self._local, self._local.node
        mixer.bind(mixing, local.transport, local.world)
        if isinstance(mixer, Rounds):
            mixer.bind_to_training(local.loop, is_whole=node is None or node.is_whole)
        if mixer.never_waits:
            local.loop.equal_steps.end()
        if mixer.is_weighted:
            local.loop.move_weights()
        engine = self._make_engine(mixer, schedule)
        if node is None:
            self._start(engine, local.world.averager_of(engine.averager))
        else:
            engine = node.engine_of(engine)
            self._start(engine, node.averager(engine))

    def _make_engine(self, mixer: Mixer, schedule: Schedule) -> LockstepEngine:
        """When rounds run."""
        is_eager, overlap, measurement = self._local.node is None or self._local.node.is_eager, None, None
        if self._overlap == "auto":
            measurement = Measurement(OverlapLimits(self._max_staleness, self._wire_limit), is_eager=is_eager)
        elif self._overlap:
            overlap = Overlap(max_staleness=self._max_staleness, is_eager=is_eager)
        options: dict[str, Any] = {"on_nonfinite": self._on_nonfinite, "world": self._local.world}
        return LockstepEngine(mixer, schedule, overlap=overlap, measurement=measurement, **options)

    @property
    def overlap(self) -> bool | str:
        """Whether rounds run under training; "auto" until all ranks have chosen."""
        return self._overlap if self.overlap_choice is None else self.overlap_choice.overlap

    @property
    def max_staleness(self) -> int:
        """The number of forwards before training waits for a late overlapped round; with "auto" the limit, until it is
        chosen."""
        return self._max_staleness if self.overlap_choice is None else self.overlap_choice.max_staleness

    @property
    def overlap_choice(self) -> OverlapChoice | None:
        """The choice of overlap="auto", with its measurements; None before it, and without "auto".

        `state_dict()` has it, and a run with this state continues with it.
        """
        engine = getattr(self._local, "engine", None)  # a constructor that failed has none
        return engine.choice if isinstance(engine, LockstepEngine) else None

    def settle(self) -> None:
        """See `AveragingMixin`. All ranks call it, so later rounds mix the present trained tensors."""
        local = self._local
        if not (local.is_closed or local.is_averaged):
            for _ in range(local.loop.take_left_out()):
                local.step()
            local.choose(may_leave=False)
        super().settle()

    def count_tokens(self, num_tokens: int) -> None:
        """Count the tokens of this rank, for an algorithm with weights by tokens.

        Call it once for each optimizer step, before or after it and before the next forward; with `rounds="step"`
        before it, as the round of a step runs at its end. A batch of other data has no tokens: count its samples. If
        several processes hold one model, count the tokens of all of them, in each process. In a node of a membership
        only the count of the first process has an effect.

        Args:
            num_tokens: at least 0.

        Raises:
            ValueError: the number is out of range, or the algorithm gives all ranks equal weights. Or, in an optimizer
                step with `rounds="step"`: the tokens of this step were not counted.

        Example:
            >>> model = GossipDataParallel(model, algorithm=DiLoCo(weighted_by="tokens"))
            >>> for tokens, mask in loader:
            ...     loss = model(tokens).mean()
            ...     loss.backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            ...     model.count_tokens(int(mask.sum()))
        """
        if isinstance(num_tokens, bool) or not isinstance(num_tokens, int) or num_tokens < 0:
            raise ValueError(f"got num_tokens={num_tokens!r}, expected a whole number of at least 0, such as x.numel()")
        # No error for a copy of a wrapper with a membership, the one case of another engine: the copy has no rounds
        # that weigh tokens, so a loop that counts them loses nothing. Its training forward warns that it trains alone.
        if isinstance(engine := self._local.engine, LockstepEngine):
            if engine.rounds is None or not engine.rounds.algorithm.counts_tokens:
                raise ValueError(
                    f"got count_tokens() with {engine.mixer}, which gives all ranks equal weights, expected an "
                    "algorithm that counts tokens, such as DiLoCo(weighted_by='tokens'); leave the call out"
                )
            engine.rounds.count_tokens(num_tokens)
        if self._needs_tokens:
            self._has_counted = True

    def _round_after_step(self) -> None:
        """See `GossipWrapper`.

        Raises:
            ValueError: see `count_tokens`.
        """
        local = self._local
        is_last = local.loop.num_owed == 1  # the others are of steps that were left out before
        if is_last and self._needs_tokens and not (self._has_counted or local.is_closed):
            raise ValueError(
                f"got an optimizer step of a {type(self).__name__} with rounds='step' and no count_tokens() before it: "
                "its round runs now, and the weight of this rank needs its tokens; expected count_tokens() before "
                "optimizer.step(), or rounds='forward', with which it may come after the step"
            )
        super()._round_after_step()
        if is_last and self._needs_tokens:
            self._has_counted = False

    # State.

    def get_extra_state(self) -> dict[str, Any]:
        """See `GossipWrapper`; with the push-sum weight and the graph of the rounds.

        The graph is None with a membership, where each number of workers has its own.
        """
        weight = self._local.buffer.vector.push_sum_weight.clone()
        return {"weight": weight, "graph": self._graph, **super().get_extra_state()}

    def set_extra_state(self, state: dict[str, Any] | None) -> None:
        """See `GossipWrapper`; without state, or if rounds keep all weights at 1, the push-sum weight is 1.

        Warns where ranks may have mixed on another graph when the state was saved, by an older version; all is loaded
        by then. With a membership it does not: the graph depends on the number of workers.

        Raises:
            ValueError: the state belongs to a wrapper of another kind.
        """
        if state is not None and "weight" not in state:
            raise ValueError(
                f"got gossip state without a push-sum weight, expected that of a {type(self).__name__} or its like; "
                "wrap as when it was saved, or load the model alone: module.load_state_dict"
            )
        super().set_extra_state(state)
        vector = self._local.buffer.vector
        if state is not None and self._local.loop.debias is not None:
            vector.push_sum_weight.copy_(state["weight"])
        else:  # the saved parameters are estimates
            vector.reset_weight_()
        if state is not None and "graph" not in state and self._was_on_a_ring:
            warnings.warn(
                f"got a checkpoint of an older version, where ranks mixed on a ring if no graph was named; now it is "
                f"{self._graph}, on which models stay closer to each other. The run goes on "
                'with that; to go on with the ring: graph="ring"',
                stacklevel=2,
            )

    # `with Join([wrapper]):` around a training loop whose ranks have different numbers of batches. Inside, every rank
    # tells the others at the start of each step that it is still there. A rank in the context's exit takes part in one
    # round per step of the others, with parameters that no gradient moves any more.

    def _notify(self) -> None:
        """Tell the others of another batch.

        Raises:
            RuntimeError: a rank has run out of data, where `Join` was told to throw then.
            TimeoutError, ConnectionError: a rank is late or gone; names it.
        """
        limit, start = self._local.transport.timeout, time.monotonic()
        if self._others is None and dist.get_backend() == "gloo":
            self._others = connect(dist.group.WORLD, timeout=limit)  # to find out which rank fails
        try:
            work = Join.notify_join_context(self)
            if work is not None:
                work.wait(limit)
        except RuntimeError as error:
            *_, (frame, _) = traceback.walk_tb(error.__traceback__)
            if frame.f_code is Join.notify_join_context.__code__:  # which throws as it was told to
                raise
            what = f"telling ranks 0 to {dist.get_world_size() - 1} of another batch (Join)"
            seconds = time.monotonic() - start
            if self._others is None:
                fail(error, rank=dist.get_rank(), what=what, seconds=seconds, timeout=limit)
            self._others.fail(error, what, seconds, timeout=limit)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """See `torch.distributed.algorithms.Joinable`: shadows one round per training step of the others."""
        local = self._local
        if local.node is not None:
            raise ValueError(
                "got a model that several processes hold together (nprocs_per_node, or shards) inside Join, expected a "
                "whole model in each; give the processes of a model equally many batches"
            )
        if local.world.changes:
            raise ValueError(
                "got a wrapper with a membership inside Join, expected none: a worker that runs out of data leaves by "
                "close(), and the others go on"
            )
        if local.transport.world_size != dist.get_world_size():
            raise ValueError(
                f"got Join over a process group of {local.transport.world_size} of {dist.get_world_size()} ranks, "
                "expected all; Join counts the ranks of the default group"
            )
        return Shadow(local.step, self.flush)

    @property
    def join_device(self) -> torch.device:
        """See `Joinable`."""
        return torch.device(self._local.transport.device)

    @property
    def join_process_group(self) -> Any:
        """See `Joinable`: the default group, since ours carries rounds, perhaps from another thread."""
        return dist.group.WORLD


class Shadow(JoinHook):
    """A rank without further data.

    Args:
        step: takes part in one step of the others.
        flush: applies everything in flight, when all ranks have run out of data.
    """

    def __init__(self, step: Callable[[], None], flush: Callable[[], None]) -> None:
        self._step, self._flush = step, flush

    def main_hook(self) -> None:
        """See `JoinHook`."""
        self._step()

    def post_hook(self, is_last_joiner: bool) -> None:
        """See `JoinHook`."""
        self._flush()
