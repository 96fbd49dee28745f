"""A device "late", registered as PrivateUse1, that computes on the CPU; a program that trains on it in all wrappers.

    python -m tests.harness.late_device

Copies to the host that do not block happen when something waits for them, and not earlier: memory that is read too
early has old values. The device has no float64 and no pinned memory, like Apple's, and every name of `torch.cuda` that
queues or waits raises an error. Older versions of torch need C++ for a device.

Tensors pass between the CPU and the device as DLPack capsules that name the other one, so both share memory.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.utils import backend_registration

from gossip_modules import (
    BilatGossipDataParallel,
    Choco,
    DiLoCo,
    GossipDataParallel,
    GroupAverageDataParallel,
    PairwiseDataParallel,
    PowerGossip,
    RunningSums,
    SignNorm,
)
from gossip_modules.lab import Compute, LabPlan, LabTask, Network, Setting
from gossip_modules.lab.comparison import LabTraining
from gossip_modules.transport import exchange
from tests.harness.problems import mlp
from tests.harness.ranks import run_ranks

NAME, CPU_TYPE, DEVICE_TYPE = "late", 1, 12  # of DLPack: the CPU, and an extension
VIEWS = tuple(getattr(torch.ops.aten, name) for name in ("as_strided", "view", "set_", "_reshape_alias"))
"""Operators on shapes and strides, for which the code of the CPU does not read memory."""
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype, _pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


class Copy:
    """A copy to the host.

    Args:
        target: the memory.
        values: the values, as they are when the copy is queued.
    """

    def __init__(self, target: Tensor, values: Tensor) -> None:
        self.target, self.values, self.is_done = target, values, False

    def run(self) -> None:
        """Write the values, once."""
        with lock:
            if not self.is_done:
                self.target.copy_(self.values)
                self.is_done = True


class LateEvent:
    """As `torch.Event`."""

    def __init__(self, device: Any = None) -> None:
        self.copies: set[Copy] = set()

    def record(self, stream: LateStream) -> None:
        """Take the copies that are queued in a stream."""
        with lock:
            self.copies = {copy for copy in stream.copies if not copy.is_done}

    def query(self) -> bool:
        """Whether all are done."""
        return all(copy.is_done for copy in self.copies)

    def synchronize(self) -> None:
        """Do them."""
        for copy in self.copies:
            copy.run()


class LateStream:
    """As `torch.Stream`."""

    def __init__(self, device: Any = None) -> None:
        self.device = device
        self.copies: set[Copy] = set()

    def record_event(self, event: LateEvent | None = None) -> LateEvent:
        """See `torch.Stream`."""
        event = event or LateEvent()
        event.record(self)
        return event

    def wait_stream(self, other: LateStream) -> None:
        """See `torch.Stream`."""
        self.wait_event(other.record_event())

    def wait_event(self, event: LateEvent) -> None:
        """See `torch.Stream`."""
        self.add(*event.copies)

    def add(self, *copies: Copy) -> None:
        """Queue copies."""
        with lock:
            self.copies = {copy for copy in {*self.copies, *copies} if not copy.is_done}

    def synchronize(self) -> None:
        """See `torch.Stream`."""
        self.record_event().synchronize()

    def __enter__(self) -> LateStream:
        self._before, here.stream = current_stream(), self
        return self

    def __exit__(self, *_: object) -> None:
        here.stream = self._before


lock = threading.RLock()
here = threading.local()
default = LateStream()


def current_stream(device: Any = None) -> LateStream:
    """As `torch.accelerator.current_stream`."""
    stream: LateStream = getattr(here, "stream", default)
    return stream


def shared(x: Tensor, device_type: int) -> Tensor:
    """The same memory as a tensor of the other device."""
    capsule = torch._C._to_dlpack(x.detach())
    address = _pointer_of(capsule, b"dltensor")
    # struct DLTensor begins with the address of the data, the type of the device and its number.
    ctypes.c_int32.from_address(address + ctypes.sizeof(ctypes.c_void_p)).value = device_type
    ctypes.c_int32.from_address(address + ctypes.sizeof(ctypes.c_void_p) + 4).value = 0
    result: Tensor = torch._C._from_dlpack(capsule)
    return result


def is_late(value: Any) -> bool:
    """Whether a value is a tensor of the device."""
    return isinstance(value, Tensor) and value.device.type == NAME


def run_on_cpu(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator of the device."""
    lowered: list[tuple[Tensor, Tensor]] = []

    def lower(value: Any) -> Any:
        if isinstance(value, torch.device):
            return torch.device("cpu")
        if not is_late(value):
            return value
        lowered.append((shared(value, CPU_TYPE), value))
        return lowered[-1][0]

    def lift(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.dtype in (torch.float64, torch.complex128):
            raise TypeError(f"{operator} gives float64, which {NAME} does not have")
        wholes = [whole for part, whole in lowered if part is value]
        return wholes[0] if wholes else shared(value, DEVICE_TYPE)

    if operator.overloadpacket in VIEWS:
        return operator.redispatch(torch._C.DispatchKeySet(torch._C.DispatchKey.CPU), *args, **kwargs)
    outs = {x.name: kwargs[x.name] for x in operator._schema.arguments if x.is_out and is_late(kwargs.get(x.name))}
    if outs:  # memory of the CPU's grows to the size of the result
        results = {name: torch.empty(0, dtype=out.dtype) for name, out in outs.items()}
        run_on_cpu(operator, *args, **{**kwargs, **results})
        for out, result in zip(outs.values(), results.values(), strict=True):
            if out.shape != result.shape:
                out.set_(shared(result, DEVICE_TYPE))
            shared(out, CPU_TYPE).copy_(result)
        return next(iter(outs.values())) if len(outs) == 1 else tuple(outs.values())
    kinds = [str(x.type) for x in operator._schema.arguments]  # a number may stand for a tensor
    args = tuple(
        torch.tensor(x) if kind == "Tensor" and isinstance(x, (int, float)) else x for kind, x in zip(kinds, args)
    )
    own_args, own_kwargs = pytree.tree_map(lower, (args, kwargs))
    if operator is torch.ops.aten._copy_from.default:
        source, target, non_blocking = (*own_args, False)[:3]
        if non_blocking and args[1].device.type == "cpu":
            current_stream().add(Copy(target, source.clone()))
        else:
            target.copy_(source)
        return args[1]
    if operator is torch.ops.aten._local_scalar_dense.default:
        return own_args[0].item()
    return pytree.tree_map(lift, operator(*own_args, **own_kwargs))


def no_cuda(name: str) -> Callable[..., NoReturn]:
    """A function of `torch.cuda` that nobody may call."""

    def fail(*args: Any, **kwargs: Any) -> NoReturn:
        raise AssertionError(f"torch.cuda.{name} was called for {NAME}")

    return fail


def register() -> torch.library.Library:
    """Register the device; it is there for as long as the result."""
    module = backend_registration._DummyBackendModule()
    module.get_rng_state = lambda device: torch.empty(0)  # type: ignore[attr-defined]
    module.set_rng_state = lambda state, device: None  # type: ignore[attr-defined]
    backend_registration._setup_privateuseone_for_python_backend(NAME, module)
    library = torch.library.Library("_", "IMPL")
    library.fallback(run_on_cpu, "PrivateUse1")
    for name in ("Stream", "Event", "stream", "current_stream", "synchronize"):
        setattr(torch.cuda, name, no_cuda(name))
    torch.Stream, torch.Event = LateStream, LateEvent  # type: ignore[assignment,misc]
    torch.accelerator.current_stream = current_stream  # type: ignore[assignment]
    return library


def flatten(module: nn.Module) -> Tensor:
    """The parameters, on the CPU."""
    return torch.cat([x.detach().cpu().flatten() for x in module.parameters()])


def train(wrap: Callable[[nn.Module, dist.ProcessGroup], Any], device: str) -> list[Tensor]:
    """The models of two ranks after a few steps."""

    def body(group: dist.ProcessGroup) -> Tensor:
        module = mlp(seed=group.rank()).float().to(device)
        model = wrap(module, group)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        generator = torch.Generator().manual_seed(group.rank())
        for _ in range(6):
            x = torch.randn(5, 3, generator=generator).to(device)
            model(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        model.settle()
        assert next(module.parameters()).device.type == device
        values = flatten(module)
        model.close()
        return values

    return run_ranks(2, body)


def lockstep(**options: Any) -> Callable[[nn.Module, dist.ProcessGroup], nn.Module]:
    """GossipDataParallel with these options."""
    return lambda module, group: GossipDataParallel(module, process_group=group, **options)


def train_in_lab(method: Any, device: str) -> Tensor:
    """The models of three workers of the Lab after a few steps."""
    task = LabTask(
        lambda: mlp().float().to(device),
        lambda model, x: model(x).square().sum(),
        lambda worker, step, generator: torch.randn(5, 3, generator=generator),
        lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    )
    training = LabTraining(LabPlan.of(method), Setting(3, None, Compute(0.1), Network("1 Gbit/s")), task, by="vmap")
    for _ in training.run(4):
        pass
    assert training.models.x.device.type == device
    return training.settle().cpu()


WRAPPERS: dict[str, Callable[[nn.Module, dist.ProcessGroup], Any]] = {
    "blocking": lockstep(),
    "overlap": lockstep(overlap=True),
    "deltas": lockstep(wire_dtype=torch.bfloat16, deltas=True),
    "CHOCO": lockstep(algorithm=Choco(SignNorm(), step_size=0.4)),
    "DiLoCo with a delay": lockstep(algorithm=DiLoCo(sync_every=3, delay=1)),
    "running sums": lockstep(algorithm=RunningSums),
    "AD-PSGD": lambda module, group: BilatGossipDataParallel(module, process_group=group),
    "WAGMA": lambda module, group: GroupAverageDataParallel(module, group_size=2, process_group=group),
}
IS_EQUAL = ("blocking", "overlap", "deltas", "CHOCO", "DiLoCo with a delay")


def main() -> None:
    """Print, for each wrapper, the largest difference from training on the CPU; null for the asynchronous ones.

    "dpwa" has the share of the distance that is left after four averages, and "no waits" the difference if messages do
    not wait for the device. "PowerGossip" has the error of a method that needs float64.
    """
    library = register()
    found: dict[str, Any] = {}
    for name, wrap in WRAPPERS.items():
        on_device = torch.stack(train(wrap, NAME))
        assert on_device.isfinite().all()
        found[name] = float((on_device - torch.stack(train(wrap, "cpu"))).abs().max()) if name in IS_EQUAL else None
    for method in ("sgp", "d2", Choco(SignNorm(), step_size=0.4)):
        difference = train_in_lab(method, NAME) - train_in_lab(method, "cpu")
        found[f"Lab, {str(method)[:5]}"] = float(difference.abs().max())
    first = PairwiseDataParallel(mlp(seed=0).to(NAME), name="a", peers={"a": "tcp://127.0.0.1:*"})
    peers = {"a": first.address, "b": "tcp://127.0.0.1:*"}
    second = PairwiseDataParallel(mlp(seed=1).to(NAME), name="b", peers=peers, init_from_peers=False)
    before = float((flatten(first) - flatten(second)).norm())
    for _ in range(4):
        second(torch.ones(2, 3, device=NAME))
        second.flush()
    found["dpwa"] = float((flatten(first) - flatten(second)).norm()) / before
    first.close()
    second.close()
    try:
        train(lockstep(algorithm=PowerGossip()), NAME)
    except ValueError as error:
        found["PowerGossip"] = str(error)
    exchange.wait_for_queue = lambda device: None
    trained = torch.stack(train(WRAPPERS["blocking"], NAME))
    found["no waits"] = float((trained - torch.stack(train(WRAPPERS["blocking"], "cpu"))).abs().max())
    print(json.dumps(found))
    del library


if __name__ == "__main__":
    main()
