"""GossipAccelerator: the loop of Accelerate trains as ours does, bit for bit, and resumes each rank's own model."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from gossip_modules import BilatGossipDataParallel, GossipDataParallel
from tests.harness.processes import run_processes

from . import hosts
from .hosts import (
    ACCUMULATION,
    METHODS,
    NORM,
    RANKS,
    STEPS,
    Model,
    assert_equal,
    batches,
    ending,
    own_loop,
    sgd,
    values,
)

pytestmark = [hosts.needs("accelerate"), pytest.mark.e2e, pytest.mark.timeout(120)]


def run(options: Any, folder: str = "", *, resumes: bool = False) -> tuple[Any, Any, Model, Any]:
    """The wrapper, the accelerator, the model and the rounds of each step after the loop that a user writes."""
    from gossip_modules.integrations.accelerate import GossipAccelerator

    accelerator = GossipAccelerator(
        cpu=True, mixed_precision="bf16", gradient_accumulation_steps=ACCUMULATION, gossip=options
    )
    plain = Model()
    optimizer: Any = sgd(plain)
    scheduler: Any = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: 1.0)
    model, optimizer, scheduler = accelerator.prepare(plain, optimizer, scheduler)
    half = STEPS * ACCUMULATION // 2
    data = batches()
    if resumes:
        accelerator.load_state(folder)
        data = batches()[half:]
    rounds = []
    for k, (x, y) in enumerate(data):
        if folder and not resumes and k == half:
            accelerator.save_state(folder)
        with accelerator.accumulate(model):
            accelerator.backward(hosts.loss_of(model(x), y))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), NORM)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        rounds.append(model.comm_stats()["num_rounds"])
    return model, accelerator, plain, rounds


def train(rank: int, folder: str) -> None:
    from safetensors.torch import load_file

    for name, options in {**METHODS, "a node of two": {"nprocs_per_node": 2}}.items():
        place = f"{folder}/{name}"
        expected, average = own_loop(options)
        model, accelerator, plain, rounds = run(options)
        assert plain.dtypes == {torch.bfloat16}
        assert accelerator.unwrap_model(model) is plain
        if name == "SGP":
            assert rounds == [1 + k // ACCUMULATION for k in range(STEPS * ACCUMULATION)]
        accelerator.save_model(model, f"{place}/model")
        accelerator.save_model(accelerator.unwrap_model(model), f"{place}/again")
        own, found = ending(model)
        assert_equal(own, expected)
        assert_equal(found, average)
        dist.barrier()
        for kind in ("model", "again"):
            saved = load_file(f"{place}/{kind}/model.safetensors")
            assert_equal([saved[key] for key, _ in plain.named_parameters()], average)
        # A run that takes a checkpoint, and one that goes on from there.
        model, *_ = run(options, f"{place}/state")
        expected, _ = ending(model)
        dist.barrier()
        model, *_ = run(options, f"{place}/state", resumes=True)
        own, _ = ending(model)
        assert_equal(own, expected)
        saved = torch.load(f"{place}/state/gossip_rank_{rank}_of_{RANKS}.pt", weights_only=True)
        assert sorted(saved) == ["models", "optimizers", "scalers", "schedulers"]


def other_worlds(rank: int, folder: str) -> None:
    from accelerate import Accelerator

    from gossip_modules.integrations.accelerate import GossipAccelerator

    model, accelerator, plain, _ = run({}, folder)
    dist.barrier()
    kept = Path(f"{folder}/gossip_rank_{rank}_of_{RANKS}.pt")
    content = kept.read_bytes()
    for ranks, message in ([1], "rank 1: the file of the rank: got damaged"), (range(RANKS), "which cannot be read"):
        if rank in ranks:
            kept.write_bytes(content[:100])
        with pytest.raises(ValueError, match=message):
            accelerator.load_state(folder)
    kept.write_bytes(content)
    if rank == 1:
        kept.rename(f"{folder}/gossip_rank_1_of_9.pt")
    with pytest.raises(ValueError, match=r"rank 1: the file of the rank: got missing.* give every rank the folder"):
        accelerator.load_state(folder)
    if rank != 1:
        kept.rename(f"{folder}/gossip_rank_{rank}_of_9.pt")
    dist.barrier()
    with pytest.warns(UserWarning, match=r"got no file .*gossip_rank_._of_4.pt, expected the state of this rank of 4"):
        accelerator.load_state(folder)
    # Each rank has its own loss scale.
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (8 + rank))
    accelerator.save_state(f"{folder}/scaled")
    dist.barrier()
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    accelerator.load_state(f"{folder}/scaled")
    assert accelerator.scaler.get_scale() == 2.0 ** (8 + rank)
    own = values(plain)
    assert_equal(own, ending(model)[1])  # all ranks have the average
    # What is wrapped, and how.
    gossip = functools.partial(BilatGossipDataParallel, gossip_buffers=False)
    accelerator = GossipAccelerator(cpu=True, gossip=gossip)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    first, second, teacher = accelerator.prepare(Model(), nn.Linear(2, 2), frozen)
    assert isinstance(first, BilatGossipDataParallel)
    assert isinstance(second, BilatGossipDataParallel)
    assert teacher is frozen
    assert accelerator.prepare(first) is first
    accelerator.free_memory()  # as a second train() of a Trainer does, which goes on with the wrapper
    with mock.patch.object(Accelerator, "end_training"):  # it ends the process group
        accelerator.end_training()
    assert first._local.is_closed
    assert second._local.is_closed


def float16(rank: int, folder: str) -> None:
    """Accelerate asks for a GPU with "fp16", and takes a scaler that is there."""
    from gossip_modules.integrations.accelerate import GossipAccelerator

    accelerator = GossipAccelerator(cpu=True, gossip={})
    with mock.patch.dict(accelerator.state._shared_state, _mixed_precision="fp16"):
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        plain = Model()
        model, optimizer = accelerator.prepare(plain, sgd(plain))
        skipped = []
        for k, (x, y) in enumerate(batches()):
            loss = hosts.loss_of(model(x).float(), y)
            accelerator.backward(loss * float("inf") if (rank, k) == (1, 3) else loss)
            accelerator.clip_grad_norm_(model.parameters(), NORM)
            before = values(plain)
            optimizer.step()
            skipped.append(optimizer.step_was_skipped)
            assert all(map(torch.equal, before, values(plain))) is skipped[-1]
            optimizer.zero_grad()
    assert plain.dtypes == {torch.float16}
    assert [k for k, is_left_out in enumerate(skipped) if is_left_out] == ([3] if rank == 1 else [])
    assert accelerator.scaler.get_scale() == (128.0 if rank == 1 else 256.0)
    assert model.comm_stats()["num_rounds"] == len(skipped)  # one on each rank, also where one has left out a step
    own, _ = ending(model)
    assert all(bool(x.isfinite().all()) for x in own)


def mistakes(rank: int, folder: str) -> None:
    from accelerate import Accelerator
    from accelerate.local_sgd import LocalSGD

    from gossip_modules.integrations.accelerate import GossipAccelerator

    remedy = r"make a GossipAccelerator\(..., gossip=dict\(...\)\)"
    plain = Accelerator(cpu=True)
    around = plain.prepare(GossipDataParallel(Model()))
    with pytest.raises(RuntimeError, match=remedy):
        around(batches()[0][0])
    with pytest.raises(ValueError, match=remedy):
        GossipDataParallel(plain.prepare(Model()))
    membership: Any = object()
    for gossip in ({"membership": membership}, functools.partial(GossipDataParallel, membership=membership)):
        with pytest.raises(ValueError, match=r"got membership= in gossip= of GossipAccelerator, .* by hand, with"):
            GossipAccelerator(cpu=True, gossip=gossip)
    accelerator = GossipAccelerator(cpu=True)
    with pytest.raises(ValueError, match="in GossipAccelerator, expected the plain module"):
        accelerator.prepare(GossipDataParallel(Model()))
    accelerator.gossip = lambda module: nn.Linear(2, 2)  # type: ignore[assignment,return-value]
    with pytest.raises(ValueError, match="expected a dict of arguments of GossipDataParallel, or a function"):
        accelerator.prepare(Model())
    accelerator.gossip = {}
    model, optimizer = accelerator.prepare(*(lambda m: (m, sgd(m)))(Model()))
    x, y = batches()[0]
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=8):
        accelerator.backward(hosts.loss_of(model(x), y))
        optimizer.step()
        with pytest.raises(
            RuntimeError, match=r"LocalSGD of Accelerate \(leave it out, and wrap with algorithm=LocalS"
        ):
            optimizer.step()


def alone(rank: int) -> None:
    from gossip_modules.integrations.accelerate import GossipAccelerator

    accelerator = GossipAccelerator(cpu=True)
    model = nn.Linear(2, 2)
    assert accelerator.prepare(model) is model
    assert set(accelerator.get_state_dict(model)) == {"weight", "bias"}


def test_one_process_trains_as_without_gossip() -> None:
    run_processes(1, alone, backend=None)


def test_ranks_train_as_our_loop_resume_and_name_mistakes() -> None:
    """One start of processes does all, since the import of the host is what takes long."""
    hosts.run_bodies(train, float16, other_worlds, mistakes)
