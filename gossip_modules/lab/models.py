"""Models: the models of all workers as rows of one tensor, and their optimizers."""

from __future__ import annotations

import copy
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..flat.selection import MixedBuffers, Selection, mixed_buffers
from ..flat.slots import Slot, in_order
from ..optim.mixed_momentum import MixedMomentum, buffer_name, keep_moments_in, probe_name
from ..rounds.requests import SGDStep
from ..rounds.rows import Indices
from ..rounds.stacked import LateBuffers
from .clock import Exchanges
from .tasks import LabTask, seed_of

ELEMENTWISE: frozenset[type[Optimizer]] = frozenset(
    getattr(torch.optim, name)
    for name in ("SGD", "Adam", "AdamW", "Adamax", "Adagrad", "Adadelta", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop")
)
"""Optimizers that compute each element of a parameter by itself, so that one of them may step all workers at once."""

CHUNK = 64
"""The workers whose losses are computed at once: with more, the tensors of a step leave the caches."""


class Objective(nn.Module):
    """A model with its loss, as one module.

    Args:
        model: the model.
        loss: loss(model, batch).
    """

    def __init__(self, model: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, batch: Any) -> Tensor:
        """Return the loss."""
        return self.loss(self.model, batch)


class WorkerParameters(list[nn.Parameter]):
    """The trained parameters of a worker, with its model for optimizers that ask for one, such as `MuonAdamW`.

    Args:
        parameters: the parameters.
        names: their names in `module`.
        module: a model of equal parameters with its loss.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], names: Sequence[str], module: Objective) -> None:
        super().__init__(parameters)
        self._names, self._module = names, module

    @functools.cached_property
    def model(self) -> nn.Module:
        """A copy of the model that has these parameters."""
        made = copy.deepcopy(self._module)
        replaced = dict(made.named_parameters())
        own = {id(replaced[name]): parameter for name, parameter in zip(self._names, self, strict=True)}
        for module in made.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                setattr(module, name, own.get(id(parameter), parameter))
        return made.model


class Models:
    """The models of n workers, all with the same values at first.

    [Note: vmap or loop] The losses of all workers are computed at once by `torch.func.vmap` over stacked parameters, if
    the model allows it. Control flow that depends on data does not, and neither do random numbers, for example of
    dropout: each worker then draws from a generator of its own. The first step tries, and a loop over the workers takes
    over if it fails. Buffers are changed in place by both.

    [Note: Compiled steps] `by="compile"` takes the first step by vmap. Then `torch.compile` makes one function of the
    losses and gradients of all workers, which needs a C++ compiler, and is compiled anew for each number of
    workers. Models of one process that differ in their values only share the function. Small models gain, since fewer
    kernels are called; results differ in the last bits.

    Trained parameters of several dtypes are kept in the widest of them, as master weights of mixed precision are: the
    forward gets each one in its own dtype, and rounds and the optimizer compute in the wide one.

    Args:
        task: the model, its loss, data and optimizer.
        num_workers: n.
        seed: the seed of the model, of data and of random numbers in the model.
        by: "vmap", "loop", "compile", or "" to try vmap and then loop.
        is_alone: whether workers step at their own pace, so that each has an optimizer of its own.

    Attributes:
        x: the trained parameters, [n, d].
        names, shapes, dtypes: of the trained parameters.
        learns: whether there is an optimizer.
        buffers: the buffers of the models by name, [n, ...].
        mixed: the names of the buffers that rounds mix: running statistics, and the moments of a `MixedMomentum`.
        by: the way that is taken; "" before the first step, unless a way was asked for.
        losses: the losses of the last step of each worker, [n].

    Raises:
        ValueError: the model has nothing to train, or the optimizer cannot step in the Lab.
    """

    def __init__(self, task: LabTask, num_workers: int, *, seed: int = 0, by: str = "", is_alone: bool = False) -> None:
        self.task, self.seed, self.by = task, seed, by
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.module = Objective(task.model(), task.loss)
        parameters = [Slot(self.module, name, name, p, True) for name, p in self.module.named_parameters()]
        slots = in_order(slot for slot in parameters if slot.tensor.requires_grad)  # the order of the flat vector
        trained = {slot.name: slot.tensor.detach() for slot in slots}
        if not trained:
            raise ValueError("got a model without trained parameters, expected some; set requires_grad")
        self.names, self.learns = list(trained), task.optimizer is not None
        self.shapes, self.dtypes = [p.shape for p in trained.values()], [p.dtype for p in trained.values()]
        wide = functools.reduce(torch.promote_types, self.dtypes)
        start = torch.cat([p.flatten().to(wide) for p in trained.values()])
        self.x = start.repeat(num_workers, 1)
        self.buffers = {name: torch.stack([b.detach()] * num_workers) for name, b in self.module.named_buffers()}
        self.mixed = list(Selection().averaged(self.module))
        # Of buffers in flight: the number of steps that are left, the weight of the own ones, and the rest.
        self._late: dict[str, tuple[int, Tensor, Tensor]] = {}
        self.losses = start.new_full((num_workers,), float("nan"))
        self._is_used: list[bool] = []  # of the parameters, from the first step on if steps are compiled
        task.start(self.x)
        self.optimizers: list[Optimizer] = []
        self._leaves: list[WorkerParameters] = []
        if task.optimizer is not None:
            self._make_optimizers(task.optimizer, is_alone)
            self._keep_moments()
        make = task.scheduler
        self._schedulers: list[LRScheduler] = [] if make is None else [make(each) for each in self.optimizers]

    def _make_optimizers(self, make: Callable[[WorkerParameters], Optimizer], is_alone: bool) -> None:
        views = self.views(self.x)

        def leaves(worker: int | EllipsisType) -> WorkerParameters:
            own = (nn.Parameter(view[worker]) for view in views.values())
            return WorkerParameters(own, self.names, self.module)

        own = leaves(0)
        first = make(own)
        group = first.param_groups[0]
        if group.get("fused"):
            raise ValueError(f"got {first}, expected fused=False: fused steps take rows of stacked models for whole")
        closure = inspect.signature(first.step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(f"got {first}, expected an optimizer that steps without a closure, such as AdamW")
        is_plain = type(first) is torch.optim.SGD and not (group["momentum"] or group["weight_decay"])
        is_elementwise = type(first) in ELEMENTWISE or getattr(first, "is_elementwise", False)
        if is_elementwise and (is_plain or not is_alone):
            stacked = leaves(...)
            optimizer = make(stacked)
            # Stacked parameters have one dimension more: groups by dimension would be other ones.
            if groups_of(optimizer, stacked) == groups_of(first, own):
                self._is_stacked, self._leaves, self.optimizers = True, [stacked], [optimizer]
                return
        self._is_stacked, self._leaves = False, [own, *map(leaves, range(1, len(self.x)))]
        self.optimizers = [first, *map(make, self._leaves[1:])]

    def _keep_moments(self) -> None:
        """Keep the first moments of the optimizers in buffers, if the model has a `MixedMomentum`."""
        for prefix, module in self.module.named_modules():
            if isinstance(module, MixedMomentum):
                for worker in range(len(self.optimizers)):
                    self._keep_moments_of(worker, prefix, module)

    def _keep_moments_of(self, worker: int, prefix: str, momentum: MixedMomentum) -> None:
        """Keep the first moments of an optimizer in the buffers of a `MixedMomentum` with this name."""
        rows, sources = (..., range(len(self.x))) if self._is_stacked else (worker, worker)
        parent, kept = prefix.rpartition(".")[0], []
        own = {f"{parent}.{name}": name for name in momentum.names}
        for name, leaf in zip(self.names, self._leaves[worker], strict=True):
            names = buffer_name(own[name]), probe_name(own[name])
            moment, probe = (self.buffers[f"{prefix}.{each}"][rows] for each in names)
            kept.append((leaf, moment, probe))
        keep_moments_in(self.optimizers[worker], kept.copy, lambda: sources)

    def views(self, x: Tensor) -> dict[str, Tensor]:
        """Return x [n, d] as the parameters by name, [n, *shape]; shares memory."""
        parts = x.split([shape.numel() for shape in self.shapes], dim=1)
        views = (part.view(len(x), *shape) for shape, part in zip(self.shapes, parts, strict=True))
        return dict(zip(self.names, views, strict=True))

    @property
    def num_bytes(self) -> int:
        """The bytes of the trained parameters of one worker."""
        return sum(shape.numel() * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    @functools.cached_property
    def _coded(self) -> set[str]:
        """The names of the buffers that take a code."""
        parts = ((prefix, part) for prefix, part in self.module.named_modules() if isinstance(part, MixedBuffers))
        return {f"{prefix}.{name}" for prefix, part in parts for name, _ in part.named_buffers(recurse=False)}

    @property
    def coded_share(self) -> float:
        """The share of the bytes of the mixed buffers that takes a code."""
        return sum(self.buffers[name][0].nbytes for name in self._coded) / (self.buffer_bytes or 1)

    @functools.cached_property
    def _mixed_together(self) -> list[tuple[list[str], bool]]:
        """The names of the mixed buffers, those that take a code in one list for each dtype; and whether they do."""
        groups: dict[torch.dtype, list[str]] = {}
        for name in self.mixed:
            if name in self._coded:
                groups.setdefault(self.buffers[name].dtype, []).append(name)
        return [
            *(([name], False) for name in self.mixed if name not in self._coded),
            *((g, True) for g in groups.values()),
        ]

    @property
    def buffer_bytes(self) -> int:
        """The bytes of the mixed buffers of one worker."""
        return sum(self.buffers[name][0].nbytes for name in self.mixed)

    @property
    def has_mixed_momentum(self) -> bool:
        """Whether the model has a `MixedMomentum`."""
        return bool(mixed_buffers(self.module))

    @property
    def sgd(self) -> SGDStep | None:
        """The rates of the last step; None: there is no optimizer."""
        if not self.optimizers:
            return None
        group = self.optimizers[0].param_groups[0]
        return SGDStep(float(self._rate), float(group.get("momentum", 0.0)))

    def check_momentum(self) -> None:
        """Raise a ValueError if the optimizer is not `torch.optim.SGD` with momentum."""
        for optimizer in self.optimizers[:1]:
            if type(optimizer) is not torch.optim.SGD or not optimizer.param_groups[0]["momentum"]:
                name = type(optimizer).__name__
                raise ValueError(f"got {name}, expected torch.optim.SGD with momentum, which the algorithm changes")

    def set_momentum(self, momentum: Tensor, workers: Indices) -> None:
        """Write the momentum of these workers, one row for each, into the optimizer; see `check_momentum`."""
        optimizer, views = self.optimizers[0], self.views(momentum)
        for leaf, view in zip(self._leaves[0], views.values(), strict=True):
            optimizer.state[leaf]["momentum_buffer"][torch.from_numpy(workers)] = view

    def copy(self, donor: int, worker: int) -> None:
        """Give a worker that joins the parameters, the buffers and the state of the optimizer of another one."""
        for rows in (self.x, self.losses, *self.buffers.values()):
            rows[worker] = rows[donor]
        if not self.optimizers:
            return
        if not self._is_stacked:
            self.optimizers[worker].load_state_dict(self.optimizers[donor].state_dict())
            return
        for state in self.optimizers[0].state.values():
            for rows in state.values():
                if isinstance(rows, Tensor) and rows.dim():
                    rows[worker] = rows[donor]

    def mix_buffers(self, exchanges: Exchanges, workers: Indices, *, late: LateBuffers | None = None) -> None:
        """Mix the buffers of these workers in the rounds of their models, once per step.

        Args:
            exchanges: the communication of a step.
            workers: the rows that take part, int64.
            late: the arrival of the buffers; None: now.
        """
        self._land_buffers(workers, lands_all=bool(exchanges))
        if len(workers) < 2 or not exchanges:
            return
        chosen = torch.from_numpy(workers)
        for names, takes_code in self._mixed_together:
            own = self._stacked_buffers(names, chosen)
            mixed, kept = own, own.new_ones((len(own), 1))
            for each in exchanges:
                mixed, kept = each.mix_buffers(mixed, kept, takes_code=takes_code)
            if late is None or exchanges[0].is_awaited:
                self._write_buffers(names, chosen, mixed)
            else:
                self._late[names[0]] = (late.num_steps, *late.split(mixed, own, kept))

    def settle_buffers(self, workers: Indices) -> None:
        """Let the buffers in flight arrive now.

        Args:
            workers: the rows that took part, int64.
        """
        self._land_buffers(workers, lands_all=True)

    def _land_buffers(self, workers: Indices, *, lands_all: bool) -> None:
        """Let buffers in flight arrive, those that are due in this step or all."""
        chosen, late, self._late = torch.from_numpy(workers), self._late, {}
        for names, _ in self._mixed_together if late else ():
            left, kept, rest = late[names[0]]
            if left > 1 and not lands_all:
                self._late[names[0]] = (left - 1, kept, rest)
            else:
                self._write_buffers(names, chosen, kept * self._stacked_buffers(names, chosen) + rest)

    def _stacked_buffers(self, names: Sequence[str], chosen: Tensor) -> Tensor:
        """Return the buffers with these names as columns, [n, m]."""
        return torch.cat([self.buffers[name][chosen].flatten(1) for name in names], 1)

    def _write_buffers(self, names: Sequence[str], chosen: Tensor, columns: Tensor) -> None:
        """Write the columns of `_stacked_buffers` back."""
        parts = columns.split([self.buffers[name][0].numel() for name in names], 1)
        for name, part in zip(names, parts, strict=True):
            self.buffers[name][chosen] = part.view(-1, *self.buffers[name].shape[1:])

    def step(
        self, z: Tensor, k: int, workers: Indices, *, averages: bool = False, narrow: torch.dtype | None = None
    ) -> None:
        """Take the optimizer step k of some workers.

        Args:
            z: the models that gradients are taken at, [n, d].
            k: the number of the step.
            workers: the rows that step, int64.
            averages: whether each worker steps by the mean of the gradients of these workers.
            narrow: the dtype in which gradients, divided by the number of workers, are added; None: their own.
        """
        if not (self.learns and len(workers)):
            return
        self.module.train()
        parameters = {name: view.detach().requires_grad_() for name, view in self.views(z).items()}
        chosen = torch.from_numpy(workers)
        if self._is_used:
            gradients, losses = self._compiled_gradients(parameters, k)
            losses = losses[chosen]
        else:
            losses = self._losses(parameters, k, workers)[chosen]
            gradients = torch.autograd.grad(losses.sum(), list(parameters.values()), allow_unused=True)
            self._is_used = [g is not None for g in gradients] if self.by == "compile" else []
        self.losses[chosen] = losses.detach().to(self.losses)
        if averages:
            gradients = tuple(None if g is None else _mean(g, chosen, narrow) for g in gradients)
        self._rate = self.optimizers[0].param_groups[0]["lr"]
        for index in range(1) if self._is_stacked else workers.tolist():
            for leaf, gradient in zip(self._leaves[index], gradients, strict=True):
                leaf.grad = gradient if gradient is None or self._is_stacked else gradient[index]
            self.optimizers[index].step()
        for scheduler in self._schedulers:
            scheduler.step()

    def _losses(self, parameters: Mapping[str, Tensor], k: int, workers: Indices) -> Tensor:
        """Return the losses of all workers, [n]; see [Note: vmap or loop]. The others are not used."""
        if self.by != "loop":
            kept = {name: buffer.clone() for name, buffer in self.buffers.items()} if not self.by else {}
            try:
                losses = self._losses_by_vmap(parameters, k)
                self.by = self.by or "vmap"
                return losses
            except (RuntimeError, TypeError, ValueError):
                if self.by:
                    raise
                self.by = "loop"
                for name, buffer in kept.items():
                    self.buffers[name].copy_(buffer)
        rows, device = [self.losses.new_zeros(())] * len(self.x), self.x.device
        with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device], device_type=device.type):
            for i in workers.tolist():
                state = self._own({name: rows_of[i] for name, rows_of in {**parameters, **self.buffers}.items()})
                torch.manual_seed(seed_of(self.seed, i, k))
                batch = _moved(self.task.batch(i, k, self.seed), device)
                rows[i] = functional_call(self.module, state, (batch,))
        return torch.stack(rows)

    def _losses_by_vmap(self, parameters: Mapping[str, Tensor], k: int) -> Tensor:
        def loss(state: Mapping[str, Tensor], batch: Any) -> Tensor:
            return functional_call(self.module, self._own(state), (batch,))

        batches = _moved(self.task.batches(len(self.x), k, self.seed), self.x.device)
        with sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():  # fused attention has no rule for vmap
            warnings.simplefilter("ignore", UserWarning)
            return torch.vmap(loss, chunk_size=CHUNK)({**parameters, **self.buffers}, batches)

    def _compiled_gradients(self, parameters: Mapping[str, Tensor], k: int) -> tuple[Sequence[Tensor | None], Tensor]:
        """Return the gradients and the losses of all workers; see [Note: Compiled steps]."""
        batches = _moved(self.task.batches(len(self.x), k, self.seed), self.x.device)
        dtypes = dict(zip(self.names, self.dtypes, strict=True))
        with sdpa_kernel(SDPBackend.MATH):
            found, losses = _compiled()(self.module, dtypes, dict(parameters), self.buffers, batches)
        used = zip(found.values(), self._is_used, strict=True)
        return [gradient if is_used else None for gradient, is_used in used], losses

    def _own(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return parameters and buffers by name, each parameter in its own dtype."""
        own = {name: state[name].to(dtype) for name, dtype in zip(self.names, self.dtypes, strict=True)}
        return {**state, **own}

    def mean_model(self, z: Tensor, workers: Indices) -> nn.Module:
        """Return the module with the mean of the models z [n, d], and of their buffers, in evaluation mode."""
        chosen = torch.from_numpy(workers)
        state = {name: view.mean(0) for name, view in self.views(z).items()}
        for name, buffer in self.buffers.items():
            rows = buffer[chosen]
            state[name] = rows.mean(0) if rows.is_floating_point() else rows[0]
        self.module.load_state_dict(state, strict=False)
        return self.module.model.eval()


def _gradients(
    module: Objective,
    dtypes: Mapping[str, torch.dtype],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batches: Any,
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients by name, [n, *shape], and the losses, [n], of stacked models."""

    def loss(own: Mapping[str, Tensor], of_buffers: Mapping[str, Tensor], batch: Any) -> Tensor:
        state = {name: parameter.to(dtypes[name]) for name, parameter in own.items()}
        return functional_call(module, {**state, **of_buffers}, (batch,))

    return torch.vmap(grad_and_value(loss))(parameters, buffers, batches)


@functools.cache
def _compiled() -> Callable[..., tuple[dict[str, Tensor], Tensor]]:
    """Return `_gradients`, compiled anew for each structure of a model and each number of workers."""
    return torch.compile(_gradients, dynamic=False)


def groups_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return the settings of the groups of an optimizer, with the numbers of their parameters.

    Args:
        optimizer: the optimizer.
        parameters: all its parameters.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    groups = optimizer.param_groups
    return [{**group, "params": [places.get(id(each)) for each in group["params"]]} for group in groups]


def _moved(batch: Any, device: torch.device) -> Any:
    """Return a batch, or a structure of batches, on the device."""
    if isinstance(batch, Mapping):
        return {key: _moved(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        values = [_moved(value, device) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return batch.to(device) if isinstance(batch, Tensor) else batch


def _mean(gradients: Tensor, chosen: Tensor, narrow: torch.dtype | None) -> Tensor:
    """Return the mean gradient of the chosen workers in each row, with the rounding of DDP's hooks of 16 bits.

    As the hooks it rounds, divides in 16 bits and adds; the sum is rounded once, and not at each worker of a ring.

    Args:
        gradients: of all workers, [n, ...].
        chosen: the workers whose gradients count, int64.
        narrow: the dtype of 16 bits; None: nothing is rounded.
    """
    own = gradients[chosen]
    mean = own.mean(0) if narrow is None else (own.to(narrow) / len(own)).float().sum(0).to(narrow).to(own)
    return mean.expand_as(gradients).clone()
