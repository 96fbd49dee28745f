"""GossipAdamW: AdamW with the second moments of all-reduce, estimated on each rank."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..warn import levels_to_user
from .base import StepOptimizer, check_count, check_numbers

_CACHED = 65536
"""Elements of parameters that one kernel takes together on a processor, so that they stay in its cache."""
_NEGLIGIBLE = 1e-17
"""A share of 1 that float64 does not hold."""
PROBE, SHARE = "probe", "noise_share"
"""The names of p and K in the state of a parameter whose moments are mixed."""
PROBED = 64
"""Elements of the probe of a parameter, or the elements of the parameter if there are fewer."""


class GossipAdamW(StepOptimizer):
    """GossipAdamW: AdamW for ranks with steps by their own gradients.

    All-reduce gives Adam the mean gradient of n ranks, and the second moment of the mean is a^2 + b^2 / n, where a is
    the gradient and b^2 the variance of the noise of one rank's batch. A rank with gossip sees a^2 + b^2. Where noise
    prevails its steps are up to sqrt(n) times too short, and steps of other elements are not, so that no learning rate
    makes up for it. The average m of the gradient has less noise, a known share of b^2. So the averages of g^2 and of
    m^2 give both a^2 and b^2, and the second moment of all-reduce. Nothing is sent for it.

    Step t = 1, 2, ... with the gradient g:

        m = b1 m + (1 - b1) g;        m' = m / (1 - b1^t)
        v = b2 v + (1 - b2) g^2;      v' = v / (1 - b2^t)      # a^2 +   b^2
        s = b2 s + (1 - b2) m'^2;     s' = s / (1 - b2^t)      # a^2 + K' b^2
        K = b2 K + (1 - b2) k_t;      K' = K / (1 - b2^t)      # k_t = k (1 + b1^t) / (1 - b1^t)
        r = max(1 / n, K')                                     # k = (1 - b1) / (1 + b1)
        u = ((r - K') v' + (1 - r) s') / (1 - K')              # a^2 + r b^2;  s' if r = K'
        x = (1 - lr weight_decay) x - lr clip(m' / (sqrt(u) + eps), L)

    [Note: Shares of the noise] Let g_i = a + e_i, with independent noise e_i of mean 0 and variance b^2. The weights of
    m' are c_i = (1 - b1) b1^(t - i) / (1 - b1^t), with the sum 1. So the mean of m'^2 is a^2 + b^2 sum_i c_i^2, and

        sum_i c_i^2 = (1 - b1)^2 / (1 - b1^t)^2  (1 - b1^(2 t)) / (1 - b1^2) = k (1 + b1^t) / (1 - b1^t) = k_t

    It falls from k_1 = 1 to k. s' is the mean of m'^2 over the steps with the weights of b2, so its mean has the mean
    K' of k_1 to k_t with these weights. K' depends on t, b1 and b2 only, so no state holds it. The mean of u follows:
    ((r - K') (a^2 + b^2) + (1 - r) (a^2 + K' b^2)) / (1 - K') = a^2 + r b^2. With b1 = 0.9, b2 = 0.95 and n = 8, K' is
    below 1 / n from step 25 on, and u then has the mean of all-reduce. Before, one rank has not averaged enough
    gradients.

    [Note: Mixed moments] Where rounds mix m (`MixedMomentum`), it has the gradients of other ranks too, and less noise
    than k_t says: after many rounds with p peers on the exponential graph it has
    (1 - b1)^2 sum_d b1^(2 d) / min((p + 1)^d, n), with one peer and b1 = 0.9 a third of k. The share depends on the
    graph, the schedule and the workers that are there, so it is measured. A probe p takes part in all that happens to
    m, with random signs z in place of the gradient; each rank draws its own signs:

        p = b1 p + (1 - b1) z;        k_t = mean((p / (1 - b1^t))^2)

    The mean of p^2 is the sum of the squared weights of all gradients in m, since signs of different ranks and steps
    are independent and z^2 = 1. Each parameter has at most 64 elements of p, and k_t is their mean over the parameters
    that one kernel takes together.

    L is the bound of a step of Adam, (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), so that no step is longer than one of
    Adam can be. With n = 1 this is AdamW. From n = 1 / K' on, 19 for b1 = 0.9 without mixed moments, more ranks change
    nothing; `docs/benchmarks/language.md` has the measurements of slower averages.

    Take it with SGP and with every other method with steps by a rank's own gradients, also as inner optimizer of local
    SGD and DiLoCo. Do not take it with AllReduce: its gradients are means already.

    The law is this library's own; `docs/benchmarks/language.md` has the measurements behind it.

    Args:
        params: parameters, or groups of them.
        lr: the learning rate.
        betas: b1 and b2, between 0 and 1; b1^2 < b2.
        eps: added to the root.
        weight_decay: decoupled, as in AdamW.
        num_ranks: n, the number of ranks in an all-reduce of gradients: `dist.get_world_size()`, or the number of nodes
            with `nprocs_per_node=`. Change the entry `num_ranks` of the groups when ranks come or go. A loaded state
            leaves it as it is.

    Raises:
        ValueError: a setting out of range; (steps) sparse gradients; (load_state_dict) the state of another optimizer.

    Attributes:
        sources: returns the number of the rank whose gradients these are, or the numbers of the rows of stacked
            parameters; None: no round mixes the moments. See [Note: Mixed moments]; `MixedMomentum.of` sets it.

    Example:
        >>> optimizer = GossipAdamW(model.parameters(), lr=1e-3, num_ranks=8)
    """

    moments = ("exp_avg", "exp_avg_sq", "exp_sq_avg")  # m, v and s
    is_elementwise = True  # the Lab may step all workers by one of these
    sources: Callable[[], int | Sequence[int]] | None = None

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
        *,
        num_ranks: int,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "num_ranks": num_ranks}
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`."""
        group = {**self.defaults, **param_group}
        betas = group["betas"]
        check_count("GossipAdamW", "num_ranks", group["num_ranks"], "; 1 is AdamW")
        check_numbers("GossipAdamW", **{name: group[name] for name in ("lr", "eps", "weight_decay")})
        if not (len(betas) == 2 and all(0 < beta < 1 for beta in betas) and betas[0] ** 2 < betas[1]):
            raise ValueError(
                f"GossipAdamW: got betas={betas!r}, expected numbers between 0 and 1 with b1^2 < b2, such as "
                "(0.9, 0.95): with b1 = 0 no average of the gradient tells its noise"
            )
        super().add_param_group(param_group)

    def update(self) -> None:
        """See `StepOptimizer`."""
        for group in self.param_groups:
            alike: dict[tuple[Any, ...], list[Tensor]] = defaultdict(list)  # tensors that one kernel takes together
            for x in group["params"]:
                if x.grad is not None:
                    alike[x.device, x.dtype, self.advanced(x, x.grad)["step"]].append(x)
            for (device, _, t), tensors in alike.items():
                kept = self._noise_share(tensors, t, *group["betas"])
                for part in _parts(tensors) if device.type == "cpu" else [tensors]:
                    self._step(part, t, group, kept)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """See `torch.optim.Optimizer`; the groups keep their own `num_ranks`."""
        own = [group["num_ranks"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, num_ranks in zip(self.param_groups, own, strict=True):
            group["num_ranks"] = num_ranks

    def _noise_share(self, x: list[Tensor], t: int, b1: float, b2: float) -> float | Tensor:
        """K', one for all of these parameters; of stacked parameters one for each row, float64 [n]."""
        if self.sources is None:
            if PROBE in self.state[x[0]]:
                self._forget_probes(x)
            return noise_share(t, b1, b2)
        sources, states = self.sources(), [self.state[each] for each in x]
        for each, state in zip(x, states, strict=True):
            if PROBE not in state:
                state.update(_probe_after(t - 1, b1, b2, each, sources))
        probes = [state[PROBE] for state in states]
        sizes = [probe.shape[-1] for probe in probes]
        z = _signs(sources, t, sum(sizes)).to(probes[0])
        torch._foreach_lerp_(probes, z.split(sizes, -1), 1 - b1)
        p = torch.cat(probes, -1)
        squares = p.to(torch.promote_types(p.dtype, torch.float32)).square().mean(-1)
        k_t: Any = squares.double() if squares.dim() else squares.item()
        k_t = k_t / (1 - b1**t) ** 2
        for state in states:
            state[SHARE] = b2 * state[SHARE] + (1 - b2) * k_t
        return sum(state[SHARE] for state in states) / len(states) / (1 - b2**t)

    def _forget_probes(self, x: list[Tensor]) -> None:
        """Drop p and K of these parameters, which nothing updates any more, and warn."""
        warnings.warn(
            "GossipAdamW: got a state of mixed moments in an optimizer that no MixedMomentum knows, expected "
            "momentum.of(optimizer), also after a copy of model and optimizer; it takes the moments for those of this "
            "rank alone",
            stacklevel=levels_to_user(),
        )
        for each in x:
            self.state[each].pop(PROBE, None)
            self.state[each].pop(SHARE, None)

    def _step(self, x: list[Tensor], t: int, group: dict[str, Any], kept: float | Tensor) -> None:
        """The update, for parameters with equally many steps and the share K' of the noise."""
        (b1, b2), lr = group["betas"], group["lr"]
        g = [each.grad for each in x if each.grad is not None]
        m, v, s = ([self.state[each][name] for each in x] for name in self.moments)
        first, second = 1 - b1**t, 1 - b2**t
        of_all = _weight_of_all(1 / group["num_ranks"], kept)
        longest = first * (1 - b1) / math.sqrt((1 - b2) * (1 - b1**2 / b2))
        torch._foreach_lerp_(m, g, 1 - b1)
        torch._foreach_mul_(v, b2)
        torch._foreach_addcmul_(v, g, g, value=1 - b2)
        torch._foreach_mul_(s, b2)
        torch._foreach_addcmul_(s, m, m, value=(1 - b2) / first**2)
        root = _combined(v, s, of_all, 1 / second)
        torch._foreach_sqrt_(root)
        torch._foreach_add_(root, group["eps"])
        step = torch._foreach_div(m, root)
        torch._foreach_clamp_max_(step, longest)
        torch._foreach_clamp_min_(step, -longest)
        torch._foreach_mul_(x, 1 - lr * group["weight_decay"])
        torch._foreach_add_(x, step, alpha=-lr / first)


def _probe_after(t: int, b1: float, b2: float, x: Tensor, sources: int | Sequence[int]) -> dict[str, Any]:
    """p and K of a parameter after t steps whose moments no round has mixed."""
    rows = () if isinstance(sources, int) else (len(sources),)
    size = min(x.numel() // math.prod(rows), PROBED)
    deviation = math.sqrt((1 - b1) / (1 + b1) * (1 - b1 ** (2 * t)))
    kept = noise_share(t, b1, b2) * (1 - b2**t) if t else 0.0
    share = torch.full(rows, kept, dtype=torch.float64, device=x.device) if rows else kept
    return {PROBE: deviation * _signs(sources, 0, size).to(x), SHARE: share}


def _weight_of_all(share: float, kept: float | Tensor) -> float | Tensor:
    """(r - K') / (1 - K'), the weight of v' in u, for the share 1 / n and K'."""
    if isinstance(kept, Tensor):
        return (share - kept).clamp_min(0) / (1 - kept).clamp_min(_NEGLIGIBLE)
    return max(share - kept, 0.0) / max(1 - kept, _NEGLIGIBLE)


def _combined(v: list[Tensor], s: list[Tensor], share: float | Tensor, factor: float) -> list[Tensor]:
    """factor (share v + (1 - share) s); a share [n] has one number for each row."""
    if isinstance(share, Tensor):
        shares = (share.to(x).view(-1, *[1] * (x.dim() - 1)) for x in v)
        return [factor * torch.lerp(y, x, own) for x, y, own in zip(v, s, shares, strict=True)]
    root = list(torch._foreach_mul(v, share * factor))
    torch._foreach_add_(root, s, alpha=(1 - share) * factor)
    return root


def _signs(sources: int | Sequence[int], t: int, size: int) -> Tensor:
    """Draw the random signs of step t, int8 [size] of one source, or [n, size] of several."""
    if isinstance(sources, int):
        return torch.from_numpy(2 * np.random.default_rng((sources, t)).integers(2, size=size, dtype=np.int8) - 1)
    return torch.stack([_signs(source, t, size) for source in sources])


def noise_share(t: int, b1: float, b2: float) -> float:
    """K': the share of the variance of a gradient in the average of m'^2 after t steps; see `GossipAdamW`.

    Example:
        >>> [round(noise_share(t, 0.9, 0.95), 4) for t in (1, 10, 100, 1000)]
        [1.0, 0.2681, 0.0539, 0.0526]
    """
    shares = _first_shares(b1, b2)
    last = len(shares)
    if t <= last:
        share = shares[t - 1]
    else:  # from here on k_t is k
        share = b2 ** (t - last) * shares[-1] + (1 - b2 ** (t - last)) * (1 - b1) / (1 + b1)
    return share / (1 - b2**t)


@lru_cache(maxsize=64)
def _first_shares(b1: float, b2: float) -> tuple[float, ...]:
    """K after each step until k_t is k in float64."""
    share, shares = 0.0, []
    for t in range(1, max(math.ceil(math.log(_NEGLIGIBLE) / math.log(b1)), 1) + 1):
        share = b2 * share + (1 - b2) * (1 - b1) / (1 + b1) * (1 + b1**t) / (1 - b1**t)
        shares.append(share)
    return tuple(shares)


def _parts(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Cut a list where the cache of a processor is full."""
    part: list[Tensor] = []
    size = 0
    for tensor in tensors:
        size += tensor.numel()
        if part and size > _CACHED:
            yield part
            part, size = [], tensor.numel()
        part.append(tensor)
    yield part
