"""MuonAdamW: Muon for matrices and AdamW for all else, as one optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from gossip_modules import GossipDataParallel, MuLoCo, MuonAdamW
from tests.harness.ranks import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch.optim.Muon came with torch 2.9")
TOKENS = torch.arange(5)


class Decoder(nn.Module):
    """An embedding, hidden matrices, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(5, 8), nn.LayerNorm(8)
        self.hidden, self.gate = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 5, bias=False)
        with torch.no_grad():
            for k, x in enumerate(self.parameters()):
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(k)) / 4 + (x.ndim == 1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.norm(x + self.gate(self.hidden(x).relu())))


def train_step(model: nn.Module, *optimizers: torch.optim.Optimizer) -> None:
    nn.functional.cross_entropy(model(TOKENS), TOKENS.roll(1)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def values(model: nn.Module) -> list[Tensor]:
    return [x.detach().clone() for x in model.parameters()]


def names(optimizer: MuonAdamW) -> list[list[str]]:
    return [group["param_names"] for group in optimizer.param_groups]


def test_steps_are_those_of_torchs_optimizers() -> None:
    model = Decoder()
    theirs = copy.deepcopy(model)
    own = MuonAdamW(model, lr=0.01, muon_lr=0.02, weight_decay=0.3, adjust_lr_fn="original")
    assert names(own) == [
        ["hidden.weight", "gate.weight"],
        ["embedding.weight", "head.weight"],
        ["norm.weight", "norm.bias", "hidden.bias"],
    ]
    muon = torch.optim.Muon([theirs.hidden.weight, theirs.gate.weight], lr=0.02, weight_decay=0.3)
    groups: list[dict[str, Any]] = [
        {"params": [theirs.embedding.weight, theirs.head.weight], "weight_decay": 0.3},
        {"params": [theirs.norm.weight, theirs.norm.bias, theirs.hidden.bias], "weight_decay": 0.0},
    ]
    adamw = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95))
    for _ in range(3):
        train_step(model, own)
        train_step(theirs, muon, adamw)
    assert all(map(torch.equal, values(model), values(theirs)))


def test_state_schedulers_and_copies_go_on_to_the_bit() -> None:
    model = Decoder()
    optimizer = MuonAdamW(model, lr=0.01)
    scheduler = LambdaLR(optimizer, lambda k: 1 / (1 + k))
    train_step(model, optimizer)
    scheduler.step()
    other, copied = copy.deepcopy(model), copy.deepcopy((model, optimizer))
    resumed = MuonAdamW(other, lr=0.5)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert {group["lr"] for group in resumed.param_groups} == {0.005}
    for each in ((model, optimizer), (other, resumed), copied):
        train_step(*each)
    assert all(map(torch.equal, values(model), values(other)))
    assert all(map(torch.equal, values(model), values(copied[0])))


def test_a_scaler_leaves_out_a_step_of_all_parts() -> None:
    model = Decoder()
    optimizer, scaler = MuonAdamW(model, lr=0.01), torch.amp.GradScaler("cpu")
    before = values(model)
    scaler.scale(model(TOKENS).sum() * float("inf")).backward()
    scaler.step(optimizer)
    scaler.update()
    assert all(map(torch.equal, values(model), before))
    optimizer.zero_grad()
    scaler.scale(model(TOKENS).sum()).backward()
    scaler.step(optimizer)
    assert not any(map(torch.equal, values(model), before))


@pytest.mark.parametrize("rounds", ["forward", "step"])
def test_outer_steps_see_one_optimizer_step(rounds: str) -> None:
    """Ranks with equal data train as one model: DiLoCo with one worker, by hand."""

    def body(group: dist.ProcessGroup) -> list[Tensor]:
        model = Decoder()
        wrapper = GossipDataParallel(model, process_group=group, algorithm=MuLoCo(2), rounds=rounds)
        optimizer = MuonAdamW(wrapper, lr=0.01)
        assert len(names(optimizer)[0]) == 2
        for _ in range(4):
            train_step(wrapper, optimizer)
        if rounds == "forward":
            wrapper(TOKENS)
        wrapper.close()
        return values(model)

    model = Decoder()
    optimizer = MuonAdamW(model, lr=0.01)
    phi = [x.clone() for x in values(model)]
    outer = torch.optim.SGD(phi, lr=0.7, momentum=0.6, nesterov=True)
    for k in range(4):
        train_step(model, optimizer)
        if k % 2:
            for anchor, x in zip(phi, model.parameters(), strict=True):
                anchor.grad = anchor - x.detach()
            outer.step()
            with torch.no_grad():
                for anchor, x in zip(phi, model.parameters(), strict=True):
                    x.copy_(anchor)
    for found in run_ranks(2, body):
        torch.testing.assert_close(found, values(model))


def test_the_split_can_be_named() -> None:
    model = Decoder()
    assert names(MuonAdamW(model, adamw=["gate.*", "head.weight"]))[0] == ["hidden.weight"]
    assert names(MuonAdamW(model, adamw=()))[0] == ["hidden.weight", "gate.weight", "head.weight"]
    model.gate.weight.requires_grad_(False)
    assert names(MuonAdamW(model))[0] == ["hidden.weight"]
    model.head.weight = model.embedding.weight
    assert names(MuonAdamW(model))[:2] == [["hidden.weight"], ["embedding.weight"]]
    with pytest.raises(ValueError, match=r"'heads' matches no matrix, expected names or patterns of some of \['emb"):
        MuonAdamW(Decoder(), adamw=["heads"])
    with pytest.raises(ValueError, match=r"got a Sequential whose matrices are all embeddings or heads"):
        MuonAdamW(nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 3)))


def test_parameters_that_are_trained_later_are_added_to_one_of_both() -> None:
    model = Decoder()
    for x in (model.gate.weight, model.norm.bias):
        x.requires_grad_(False)
    optimizer = MuonAdamW(model, lr=0.01, weight_decay=0.3)
    train_step(model, optimizer)
    before = values(model)
    for kind, name in (("Muon", "gate.weight"), ("AdamW", "norm.bias")):
        x = model.get_parameter(name).requires_grad_(True)
        with pytest.raises(ValueError, match="with kind=None, expected 'Muon', for hidden matrices, or 'AdamW'"):
            optimizer.add_param_group({"params": [(name, x)]})
        optimizer.add_param_group({"params": [(name, x)], "kind": kind})
    assert [group["kind"] for group in optimizer.param_groups] == ["Muon", "AdamW", "AdamW", "Muon", "AdamW"]
    assert optimizer.param_groups[-1]["betas"] == (0.9, 0.95)
    other, resumed = copy.deepcopy((model, optimizer))
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train_step(model, optimizer)
    train_step(other, resumed)
    assert not any(map(torch.equal, values(model), before))
    assert all(map(torch.equal, values(model), values(other)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"adamw": "head.weight"}, r"got adamw='head.weight', expected a list .*, such as \['head.weight'\]"),
        ({"lr": -1.0}, "got lr=-1.0, expected a number of at least 0"),
        ({"weight_decay": -0.1}, "got weight_decay=-0.1, expected a number of at least 0"),
        ({"momentum": 1.0}, "got momentum=1.0 and betas"),
        ({"adjust_lr_fn": "match"}, "got adjust_lr_fn='match' and muon_lr=None, expected one of 'match_rms_adamw'"),
        ({"adjust_lr_fn": "original"}, "and a muon_lr with 'original'"),
    ],
)
def test_settings_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MuonAdamW(Decoder(), **options)
    with pytest.raises(ValueError, match="got a generator, expected the model"):
        MuonAdamW(Decoder().parameters())  # type: ignore[arg-type]


def test_torch_without_muon_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(RuntimeError, match=r"MuonAdamW: got torch .*, expected 2.9 or later, which has torch.optim.Mu"):
        MuonAdamW(Decoder())
