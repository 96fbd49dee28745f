"""The choices that simulated methods have, with their defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class MethodOptions:
    """The choices that methods offer, all with their defaults. `Method.options` names those that a method uses."""

    graph: str = "auto"
    """Who talks to whom: a name of gossip_modules/methods/graphs.py. auto: the library's choice for dpsgd, sgp, osgp
    and adpsgd (adpsgd needs a bipartite graph), a ring for the others. Those take torus, hypercube, complete and
    matcha0 to matcha5 too, with all neighbours. relaysgd: chain or double-binary-tree, which is its own choice."""
    peers_per_itr: str = "1"
    """Peers per round, a number or <epoch>:<peers> pairs: '0:2,30:1' is two peers for 30 epochs, then one."""
    overlap: bool = False
    """Run each round under the next step, not before it; osgp always does. wagma: take the average of a group one step
    later instead of waiting for it."""
    max_staleness: int = 0
    """With overlap: forwards that a round may complete late before training waits for it."""
    gossip_every: int = 1
    """Steps from one round to the next."""
    average_every: int = 0
    """Rounds from one exact global average to the next; 0: never, and with consensus_target 16 at most."""
    consensus_target: float = 0.0
    """The distance between the ranks' models that is held by as few rounds as it takes, in units of the update of one
    step, such as 2; gossip_every is the least number of steps between rounds then. 0: rounds are not controlled."""
    consensus_remedy: Literal["average", "rounds"] = "average"
    """With consensus_target, where ranks are further apart: an exact average at once, or more rounds of gossip."""
    nprocs_per_node: int = 1
    """Processes that average gradients among themselves and gossip as one."""
    wire_dtype: str = "none"
    """none, bfloat16 or float16: what parameters are rounded to when they travel."""

    # Compressed gossip
    compressor: str = "sign"
    """sign, topk, randomk, qsgd, bfloat16, float16."""
    compression_ratio: float = 0.01
    """topk, randomk, sparseloco, sparta: share of the entries that is sent."""
    compression_bits: int = 8
    """qsgd, moniqua: bits per entry, 2, 4 or 8."""
    step_size: float = 0.0
    """Of consensus. 0: the published one (python -m gossip_modules.methods lists them), for powergossip the best for
    the spectrum of the graph, for gasloc 0.5. Other codes have none and must be given one."""

    # MATCHA
    budget: float = 0.5
    """Share of the base graph's links in use, on average over the rounds."""
    plan: str = ""
    """JSON file that python -m gossip_modules.matcha --output wrote, the same on every machine, instead of graph and
    budget; empty: the plan is made from these."""

    # Moniqua
    theta: float = 1.0
    """More than any parameter of two neighbours ever differs by; the resolution is theta / 127 at 8 bits."""

    # PowerGossip
    power_rank: int = 1
    """Rank of what is sent of a matrix."""
    power_iterations: int = 1
    """Power iterations, hence messages per neighbour, in a round."""
    warm_start: bool = True
    """Iterations go on from the last round's; otherwise they start at random."""
    compress_vectors: bool = False
    """Parameters of one dimension are compressed too, as one matrix."""

    # WAGMA-SGD
    group_size: int = 0
    """Ranks that average in a round, a power of two; 1: none, local SGD; 0: about the square root of all."""
    wait_avoiding: bool = True
    """A late rank contributes what it last had; otherwise the ranks of a group wait for each other."""

    # Averages now and then
    sync_period: int = 10
    """localsgd: steps from one average over all ranks to the next; outer optimizers: from one outer step to the next.
    wagma: rounds from one average over all ranks, which wait for each other there, to the next; 0: never."""

    # Outer optimizers
    outer_lr: float = 0.0
    """Learning rate of the outer optimizer. 0: the published one, 0.7, and for slowmo and sparseloco 1."""
    outer_momentum: float = -1.0
    """Its momentum, less than 1. Below 0: the published one, 0.9, for slowmo and noloco 0.5."""
    outer_fragments: int = 4
    """streamingdiloco: parts of the model that take outer steps at different times."""
    outer_delay: int = 1
    """streamingdiloco: steps for which an outer step travels under training, less than sync_period."""
    outer_bits: int = 0
    """diloco, streamingdiloco, eagerdiloco: bits of each entry of a drift that travels, 4 or 8; what they leave out is
    in the next drift. 0: drifts travel as they are."""

    outer_own_weight: float = -1.0
    """streamingdiloco: what a rank keeps of its own model where an outer step arrives, less than 1. Below 0: the
    published 0.5."""
    outer_gossip_every: int = 0
    """slowmo: steps from one round of SGP, on its default graph, to the next between outer steps; 0: no gossip."""
    outer_pull: float = 0.0
    """noloco: how strongly the anchors of a pair are pulled together. 0: as outer_lr."""
    anchor_device: Literal["model", "cpu"] = "model"
    """cpu: the anchor and the state of the outer optimizer are in the host's memory; model: beside the model."""
    error_decay: float = 0.95
    """sparseloco: what is kept from one outer step to the next of what was not sent."""

    # dpwa
    interpolation: Literal["constant", "clock", "loss"] = "constant"
    """How far to go towards a peer's model: always as far, the further the more often it has published, or the further
    the higher the own loss."""
    interpolation_value: float = 0.5
    """That part of the way, with constant."""
    divergence_threshold: float = 0.0
    """A loss below which a rank goes less far, in proportion; 0: none."""
    fetch_probability: float = 1.0
    """Share of the steps at which a rank asks a peer for its model."""

    @property
    def weighs_losses(self) -> bool:
        """Whether dpwa merges by losses, which ranks report then."""
        return self.interpolation == "loss" or self.divergence_threshold > 0
