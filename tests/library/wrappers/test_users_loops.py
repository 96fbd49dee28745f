"""A table of users' training loops: each method trains each loop as it is, or refuses it and names the remedy.

To add a loop, write a function `(run: Run) -> None` that trains `NUM_STEPS` steps, with its source in a comment, and
add it to `LOOPS`. The gradient of `Run.loss` does not depend on the parameters, so the right mean of all ranks after
training is known exactly: mean of x_0 - RATE * (sum of all gradients).
"""

from __future__ import annotations

import inspect
import re
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from gossip_modules import (
    AllReduceDataParallel,
    BilatGossipDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    LocalSGD,
    TopK,
)
from tests.harness.progress import local_of, weight_of
from tests.harness.ranks import run_ranks
from tests.harness.reference import flatten
from tests.library.wrappers.wrapping import irregular

NUM_RANKS = 3
NUM_STEPS = 12
RATE = 0.0625

METHODS: dict[str, Callable[..., Any]] = {
    "SGP": GossipDataParallel,
    "SGP, weights that move": lambda module, **options: GossipDataParallel(module, graph=irregular(), **options),
    "Overlap SGP": lambda module, **options: GossipDataParallel(module, overlap=True, **options),
    "LocalSGD": lambda module, **options: GossipDataParallel(module, algorithm=LocalSGD(4), **options),
    "DiLoCo": lambda module, **options: GossipDataParallel(
        module, algorithm=DiLoCo(4, lr=1.0, momentum=0.0), **options
    ),
    "CHOCO": lambda module, **options: GossipDataParallel(
        module, push_sum=False, graph="ring", algorithm=Choco(TopK(0.5), step_size=0.3), **options
    ),
    "AD-PSGD": BilatGossipDataParallel,
    "WAGMA": GroupAverageDataParallel,
    "AllReduce": AllReduceDataParallel,
}

# The rounds of asynchronous methods depend on the speed of ranks (and WAGMA takes old models of late ranks, so that the
# mean moves); AllReduce counts forwards.
WITHOUT_COUNT = {"AD-PSGD", "WAGMA", "AllReduce"}

WEIGHTS_STAY = tuple(method for method in METHODS if method != "SGP, weights that move")
"""For loops that write parameters outside of optimizer steps: such writes change z, and not the numerator."""


class Run:
    """One rank of a loop.

    Attributes:
        model: the wrapper.
        rank: the number of this rank.
    """

    def __init__(self, model: Any, rank: int) -> None:
        self.model, self.rank = model, rank

    def loss(self, step: int, model: nn.Module | None = None) -> Tensor:
        """The loss of the batch of a step, linear in the parameters; `model` is called in place of the wrapper."""
        x, y = batch(self.rank, step)
        return ((self.model if model is None else model)(x) * y).sum()

    def sgd(self, kind: type[torch.optim.Optimizer] = torch.optim.SGD) -> Any:
        """An optimizer over the parameters of the wrapper."""
        return kind(self.model.parameters(), lr=RATE)  # type: ignore[call-arg]


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Inputs [4, 3] and weights of the outputs [4, 2], float64."""
    generator = torch.Generator().manual_seed(1000 * rank + step)
    options: dict[str, Any] = {"generator": generator, "dtype": torch.float64}
    return torch.randn(4, 3, **options), torch.randn(4, 2, **options)


def start() -> nn.Module:
    """The model before training, equal on all ranks."""
    model = nn.Linear(3, 2).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(0.25)
    return model


def right_mean() -> Tensor:
    """The mean of the ranks' models after training, float64 [d]."""
    model = start()
    for rank in range(NUM_RANKS):
        for step in range(NUM_STEPS):
            (Run(model, rank).loss(step) / NUM_RANKS).backward()
    torch.optim.SGD(model.parameters(), lr=RATE).step()
    return flatten(model)


# The loops.


def plain(run: Run) -> None:
    """The loop of every tutorial."""
    optimizer = run.sgd()
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()


def accumulation(run: Run) -> None:
    """Several forwards of one step, outside no_sync(): each has a part of the loss (nanoGPT before its DDP branch)."""
    optimizer = run.sgd()
    for step in range(NUM_STEPS):
        for _ in range(2):
            (run.loss(step) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()


def sharpness_aware(run: Run) -> None:
    """davda54/sam: a second pass at a perturbed point, through `.data`."""
    optimizer = run.sgd()
    for step in range(NUM_STEPS):
        run.loss(step).backward()
        before = [parameter.data.clone() for parameter in run.model.parameters()]
        for parameter in run.model.parameters():
            parameter.data.add_(parameter.grad, alpha=0.05)
        optimizer.zero_grad()
        run.loss(step).backward()
        for parameter, value in zip(run.model.parameters(), before, strict=True):
            parameter.data = value
        optimizer.step()
        optimizer.zero_grad()


class SharpnessAware(torch.optim.Optimizer):
    """An optimizer that keeps the weights before the perturbation as state, around another optimizer."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.inner = torch.optim.SGD(self.param_groups, lr=lr)

    @torch.no_grad()
    def perturb(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["old_p"] = parameter.data.clone()
            parameter.add_(parameter.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.data = self.state[parameter]["old_p"]
        self.inner.step()
        self.zero_grad()


def sharpness_aware_optimizer(run: Run) -> None:
    """davda54/sam: the same as an optimizer, whose state equals the parameters after each step."""
    optimizer = run.sgd(SharpnessAware)
    for step in range(NUM_STEPS):
        run.loss(step).backward()
        optimizer.perturb()
        run.loss(step).backward()
        optimizer.step()


class Twice(torch.optim.SGD):
    """Evaluates its closure twice without a change of the parameters in between."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            closure()
            closure()
        return super().step()


def closures(run: Run) -> None:
    """A closure that drops its gradients, evaluated several times in one step, as line searches do."""
    optimizer = run.sgd(Twice)

    def closure(step: int) -> Tensor:
        optimizer.zero_grad()
        loss = run.loss(step)
        loss.backward()
        return loss

    for step in range(NUM_STEPS):
        optimizer.step(partial(closure, step))


def by_hand(run: Run) -> None:
    """pytorch/examples word_language_model: no optimizer at all."""
    for step in range(NUM_STEPS):
        run.model.zero_grad()
        run.loss(step).backward()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.add_(parameter.grad, alpha=-RATE)


def replaced_step(run: Run) -> None:
    """pytorch #20124, #21460, simpletransformers #80: `step` replaced on the instance, as apex and IPEX do it."""
    optimizer = run.sgd()
    plain = torch.no_grad()(inspect.unwrap(torch.optim.SGD.step))  # without the hooks of torch
    for step in range(NUM_STEPS):
        if step == 2:  # after a warm-up
            optimizer.step = types.MethodType(lambda self, closure=None: plain(self), optimizer)
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()


def idle_optimizer(run: Run) -> None:
    """nanoGPT forks: an optimizer that only a scheduler uses, beside updates through `.data`."""
    optimizer = run.sgd()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 100)
    optimizer.step()  # as the scheduler asks for; without gradients it changes nothing
    for step in range(NUM_STEPS):
        run.loss(step).backward()
        for parameter in run.model.parameters():
            parameter.data.add_(parameter.grad, alpha=-scheduler.get_last_lr()[0])
        run.model.zero_grad()
        scheduler.step()


class Child(torch.optim.SGD):
    """An optimizer whose step is a parent class's, followed by something of its own."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def nested_step(run: Run) -> None:
    """pytorch #88446, cautious optimizers: `super().step()`, while the parent class steps another model, too."""
    optimizer, critic = run.sgd(Child), nn.Linear(3, 1).double()
    other = torch.optim.SGD(critic.parameters(), lr=RATE)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()
        other.zero_grad()
        critic(batch(run.rank, step)[0]).sum().backward()
        other.step()


class Own(torch.optim.Optimizer):
    """An optimizer of no library."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for x in self.param_groups[0]["params"]:
            x.add_(x.grad, alpha=-self.param_groups[0]["lr"])


def idle_steps(run: Run) -> None:
    """A warm-up from a learning rate of 0, sparse gradients: every other step of an own optimizer changes nothing."""
    optimizer = run.sgd(Own)
    for step in range(NUM_STEPS):
        run.loss(step).backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad()
            continue
        gradients = [x.grad.clone() for x in run.model.parameters()]
        optimizer.param_groups[0]["lr"] = 0.0 if run.rank == 0 else RATE
        if run.rank > 0:
            for x in run.model.parameters():
                x.grad.zero_()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = RATE
        for x, gradient in zip(run.model.parameters(), gradients, strict=True):
            x.grad.copy_(gradient)


class Around(torch.optim.Optimizer):
    """An optimizer around another one of the same parameters."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.inner = torch.optim.SGD(parameters, lr=lr)
        super().__init__(self.inner.param_groups, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def step_around_a_step(run: Run) -> None:
    """pytorch_optimizer's Lookahead, Shampoo's grafting: the step of an optimizer inside another one's."""
    optimizer = run.sgd(Around)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()


def checkpoints(run: Run) -> None:
    """torchtitan, DCP recipes: `get_state_dict` steps an optimizer without state at a learning rate of 0."""
    optimizer = run.sgd()
    for step in range(NUM_STEPS):
        if step % 3 == 0:
            get_optimizer_state_dict(run.model.module, optimizer)
        run.loss(step).backward()
        optimizer.step()
        optimizer.zero_grad()


def steps_in_the_backward(run: Run) -> None:
    """torchtune #1833, torchtitan #705: one optimizer for each parameter, stepped as soon as it has its gradient."""

    def step_(parameter: Tensor) -> None:
        optimizers[id(parameter)].step()
        optimizers[id(parameter)].zero_grad()

    optimizers = {id(parameter): torch.optim.SGD([parameter], lr=RATE) for parameter in run.model.parameters()}
    for parameter in run.model.parameters():
        parameter.register_post_accumulate_grad_hook(step_)
    for step in range(NUM_STEPS):
        run.loss(step).backward()


def average_by_pointer(run: Run, order: str) -> None:
    """MultimediaTechLab/YOLO #47 and many copies of its class: an average of weights is swapped in by pointer."""
    optimizer, model = run.sgd(), run.model
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()
        if step % 3 == 1:
            backup = {parameter: parameter.data for parameter in model.parameters()}
            for parameter in backup:
                parameter.data = parameter.data / 2
            model.eval()
            with torch.no_grad():
                run.loss(step)
            if order == "saved":
                model.state_dict()
            if order == "train first":
                model.train()
            for parameter, memory in backup.items():
                parameter.data = memory
            model.train()


def declared_masters(run: Run) -> None:
    """A flat master that a tool steps without an optimizer of torch, declared with `follow()`."""
    parameters = list(run.model.parameters())
    master = torch.cat([parameter.detach().flatten() for parameter in parameters])
    run.model.follow([(parameters, master)])
    for step in range(NUM_STEPS):
        run.loss(step).backward()
        master.sub_(torch.cat([parameter.grad.flatten() for parameter in parameters]), alpha=RATE)
        with torch.no_grad():
            nn.utils.vector_to_parameters(master.clone(), parameters)
        run.model.zero_grad()


def average_as_parameters(run: Run) -> None:
    """Other `Parameter` objects stand in the module while it is evaluated and saved."""
    optimizer, model = run.sgd(), run.model
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()
        if step % 3 == 1:
            own = dict(model.module._parameters)
            model.module._parameters.update({name: nn.Parameter(x.detach() / 2) for name, x in own.items()})
            model.eval()
            with torch.no_grad():
                run.loss(step)
            model.state_dict()
            model.train()
            model.module._parameters.update(own)


def second_thread(run: Run) -> None:
    """Evaluation and saving in a thread of their own, while training goes on."""
    optimizer, model = run.sgd(), run.model
    has_ended = threading.Event()

    def evaluate_and_save() -> None:
        while not has_ended.is_set():
            with torch.no_grad():
                run.loss(0)
            model.state_dict()

    thread = threading.Thread(target=evaluate_and_save)
    thread.start()
    try:
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            run.loss(step).backward()
            optimizer.step()
    finally:
        has_ended.set()
        thread.join()


def masters(run: Run, form: str) -> None:
    """apex O2, Megatron, torchao, DeepSpeed: an optimizer steps masters, which a tool writes over the parameters."""
    parameters = list(run.model.parameters())
    own = [x.detach().clone() for x in (parameters if form != "partial" else parameters[:1])]
    if form == "flat":
        flat = torch.cat([*(x.flatten() for x in own), torch.zeros(5, dtype=torch.float64)]).requires_grad_()
        flat.grad = torch.zeros_like(flat)
        own, at = [], 0
        for x in parameters:
            own.append(flat.detach()[at : at + x.numel()].view(x.shape))
            own[-1].grad = flat.grad[at : at + x.numel()].view(x.shape)
            at += x.numel()
        optimizers = [torch.optim.SGD([flat], lr=RATE)]
    elif form == "each":
        optimizers = [torch.optim.SGD([x], lr=RATE) for x in own]
    else:
        optimizers = [torch.optim.SGD([*own, *parameters[len(own) :]], lr=RATE)]
    for step in range(NUM_STEPS):
        run.loss(step).backward()
        for x, master in zip(parameters, own, strict=False):
            assert x.grad is not None
            master.grad = x.grad.clone() if master.grad is None else master.grad.copy_(x.grad)
        for optimizer in optimizers:
            optimizer.step()
        with torch.no_grad():
            for x, master in zip(parameters, own, strict=False):
                x.copy_(master)
        run.model.zero_grad()


class Average(torch.optim.Optimizer):
    """A moving average of the parameters, which its steps do not change."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for x in self.param_groups[0]["params"]:
            self.state[x].setdefault("average", x.clone()).lerp_(x, 0.25)


def average_as_state(run: Run) -> None:
    """torchtitan #3982: a second optimizer keeps a moving average of the weights as its state."""
    optimizer, parameters = run.sgd(), list(run.model.parameters())
    keeper = Average(parameters, {})
    expected: list[Tensor] = []
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        run.loss(step).backward()
        optimizer.step()
        keeper.step()
        now = [x.detach().clone() for x in parameters]
        expected = [x.lerp(y, 0.25) for x, y in zip(expected or now, now, strict=True)]
    for x, right in zip(parameters, expected, strict=True):
        torch.testing.assert_close(keeper.state[x]["average"], right)


# The table.


class Refusal(NamedTuple):
    """The error that a loop ends with, in place of training."""

    kind: type[Exception]
    message: str


@dataclass(frozen=True)
class Loop:
    """A row of the table.

    Attributes:
        train: the loop of one rank.
        methods: the methods that it is run with.
        refused: by method, the error; "*" stands for all methods but AllReduce.
        warns: the beginning of each warning that it may give; other warnings are errors.
        options: options of the gossip wrappers.
    """

    train: Callable[[Run], None]
    methods: tuple[str, ...] = tuple(METHODS)
    refused: Mapping[str, Refusal] = field(default_factory=dict)
    warns: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)

    def refusal_of(self, method: str) -> Refusal | None:
        """The error with this method; None: it trains."""
        return self.refused.get(method, None if method == "AllReduce" else self.refused.get("*"))


LOOPS: dict[str, Loop] = {
    "plain": Loop(plain),
    "gradient accumulation": Loop(accumulation, warns=("got 2 training forwards",)),
    "sharpness-aware minimisation": Loop(sharpness_aware, warns=("got 2 training forwards",)),
    "sharpness-aware minimisation as an optimizer": Loop(sharpness_aware_optimizer, warns=("got 2 training forwards",)),
    "a closure that is evaluated twice": Loop(closures),
    "updates by hand": Loop(by_hand, methods=WEIGHTS_STAY),
    "a step replaced on the instance": Loop(replaced_step, methods=WEIGHTS_STAY, warns=("got 3 changes",)),
    "updates by hand beside an idle optimizer": Loop(idle_optimizer, methods=WEIGHTS_STAY, warns=("got 3 changes",)),
    "a step that calls its parent class's": Loop(nested_step),
    "steps that change nothing": Loop(idle_steps),
    "a step around another optimizer's": Loop(step_around_a_step),
    "checkpoints of an optimizer without state": Loop(checkpoints),
    "steps inside the backward": Loop(steps_in_the_backward),
    "steps inside the backward, with rounds after steps": Loop(
        steps_in_the_backward,
        methods=("SGP", "SGP, weights that move", "LocalSGD"),
        options={"rounds": "step"},
        refused={"*": Refusal(RuntimeError, r"inside a backward .*rounds='forward'")},
    ),
    **{
        f"an average swapped in by pointer, {order}": Loop(partial(average_by_pointer, order=order))
        for order in ("saved", "train first")
    },
    **{
        f"masters, {form}": Loop(partial(masters, form=form), methods=WEIGHTS_STAY)
        for form in ("partial", "each", "flat")
    },
    "an average swapped in as other parameters": Loop(average_as_parameters),
    "an average swapped in as other parameters, with rounds after steps": Loop(
        average_as_parameters, methods=("SGP", "SGP, weights that move"), options={"rounds": "step"}
    ),
    "masters, partial, with rounds after steps": Loop(
        partial(masters, form="partial"),
        methods=("SGP", "LocalSGD", "DiLoCo"),
        options={"rounds": "step"},
        refused={"*": Refusal(RuntimeError, r"got a SGD of masters.* with rounds='step'.*rounds='forward'")},
    ),
    "a moving average as the state of an optimizer": Loop(average_as_state),
    "declared masters of no optimizer": Loop(declared_masters, methods=WEIGHTS_STAY),
    "a second thread evaluates and saves": Loop(second_thread, methods=tuple(METHODS)[:-1]),
}


class Result(NamedTuple):
    """One rank after a loop: its numerator x, float64 [d], its steps, and its rounds."""

    numerator: Tensor
    num_steps: int
    num_rounds: int


def trained(loop: Loop, method: str, group: dist.ProcessGroup) -> Result | Exception:
    """Train on one rank; the error of a loop that is to be refused."""
    options = {} if method == "AllReduce" else dict(loop.options)
    wrapper = METHODS[method](start(), process_group=group, timeout=20, **options)
    try:
        loop.train(Run(wrapper, group.rank()))
        wrapper.settle()
        weight = weight_of(wrapper) if isinstance(wrapper, GossipDataParallel) else 1.0
        num_steps = NUM_STEPS if method == "AllReduce" else local_of(wrapper).num_steps
        return Result(flatten(wrapper.module) * weight, num_steps, int(wrapper.comm_stats()["num_rounds"]))
    except Exception as error:
        if loop.refusal_of(method) is None:
            raise
        return error
    finally:
        wrapper.close()


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_of_users_trains_with_each_method_or_is_refused(name: str) -> None:
    loop, right = LOOPS[name], right_mean()

    def body(group: dist.ProcessGroup) -> list[Result | Exception]:
        return [trained(loop, method, group) for method in loop.methods]

    with warnings.catch_warnings():
        for beginning in loop.warns:
            warnings.filterwarnings("ignore", message=re.escape(beginning))
        results = run_ranks(NUM_RANKS, body)
    for method, *ranks in zip(loop.methods, *results, strict=True):
        if (refusal := loop.refusal_of(method)) is not None:
            for error in ranks:
                assert isinstance(error, refusal.kind), f"{method}: {error!r}"
                assert re.search(refusal.message, str(error)), f"{method}: {error!r}"
            continue
        found = [result for result in ranks if isinstance(result, Result)]
        mean = torch.stack([result.numerator for result in found]).mean(0)
        assert {result.num_steps for result in found} == {NUM_STEPS}, f"{method}: {found}"
        assert method == "WAGMA" or (mean - right).abs().max() < 1e-12, f"{method}: {mean} in place of {right}"
        if method not in WITHOUT_COUNT:
            assert {result.num_rounds for result in found} == {num_rounds_of(method)}, f"{method}: {found}"


def num_rounds_of(method: str) -> int:
    """The rounds of a method in `NUM_STEPS` steps, each before the forward of a step."""
    return (NUM_STEPS - 1) // 4 if method in {"LocalSGD", "DiLoCo"} else NUM_STEPS
