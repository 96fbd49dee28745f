"""RunConfig: the options of every training script; frozen, filled from the command line by tyro."""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

from typing_extensions import Self

from gossip_modules.dpwa import LossInterpolation
from gossip_modules.graph_manager.named_graphs import PREDEFINED_GRAPHS, TREES
from gossip_modules.matcha.graph import MatchaGraph
from gossip_modules.methods import (
    METHODS,
    WRAPPER_OPTIONS,
    Chosen,
    WrapperOptions,
    name_of,
    read_algorithm,
    read_graph,
    unused_options,
    without_unused,
)
from gossip_modules.methods.graphs import GRAPHS
from gossip_modules.methods.wrapping import WIRE_DTYPES, schedule_of
from train.job.world import World
from train.methods.moments import MomentPeriods

_NOT_BY_MAIL = ("max_workers", "min_deadline", "resume", "checkpoint_every", "checkpoint_every_steps")
"""The options without a use over a mailbox."""


@dataclass(frozen=True)
class RunConfig(WrapperOptions, ABC):
    """The options for every task: method, checkpoints, log, network. A script adds the options of its own task."""

    recipe: str = "sgp"
    """Method: ar, dpsgd, sgp, osgp, matcha, choco, deepsqueeze, moniqua, powergossip, adpsgd, a2cid2, wagma, dpwa,
    localsgd, diloco, streamingdiloco, eagerdiloco, muloco, isoloco, sparseloco, pulseloco, slowmo, noloco, gasloc,
    qgdsgdm, d2, exactdiffusion, extra, gradienttracking, kgt, proxskip, decentlam, clippedgossip, trimmedmean,
    relaysgd, sparta;
    python -m gossip_modules.methods describes each. qgdsgdm and decentlam need SGD: train.gossip_sgd has it, other
    scripts take --optimizer sgd. A recipe is the short name of an --algorithm, with its published settings."""
    algorithm: str = ""
    """The method with settings of your own, as the text of Python: "DiLoCo(sync_every=50)", "Choco(TopK(0.01),
    step_size=0.04)", "GASLoC(momentum=0).over(PowerGossip())". Calls of known names with literals; nothing is
    evaluated. Empty: the method of --recipe. `python -m gossip_modules.methods` lists the names."""
    delay: str = ""
    """Optimizer steps from the start of an outer step to its end, under training, for methods with outer steps: a
    number, or auto: the ranks measure it. Replaces delay= of --algorithm. Empty: the delay of the method."""
    out_dir: str = ""
    """Folder for all files of this run; empty: runs/<dataset>_<recipe>."""
    resume: str = ""
    """'auto': the newest whole checkpoint of out_dir, or a new start; else the folder of a run or checkpoint."""
    overwrite: bool = False
    """Delete an earlier run in out_dir: its tables, reports, model and checkpoints, and no other files. Without this
    option a run there is an error, unless it is resumed."""
    seed: int = 1
    """Seed of all random numbers, equal on every rank: for the initial model, the share and the order of each rank's
    data, augmentation, dropout, and the random numbers of methods."""

    epochs: int = 25
    """Passes over the training data."""
    accumulation_steps: int = 1
    """Micro-batches of an optimizer step; a gossip round happens once per step."""
    label_smoothing: float = 0.1
    """Share of the target to spread evenly over all classes."""
    clip_norm: float = 0.0
    """Largest norm of gradients; each rank scales larger gradients down to it. 0: no clipping."""
    first_moment_period: int = 0
    """DES-LOC: optimizer steps from one average of the optimizer's first moments over all ranks to the next, such as
    three times sync_every of the algorithm. The first moment of sgd is its momentum. 0: never, each rank keeps its
    own."""
    second_moment_period: int = 0
    """DES-LOC: optimizer steps from one average of the second moments of Adam or AdamW over all ranks to the next, such
    as six times sync_every; 0: never."""
    amp: Literal["none", "bfloat16", "float16"] = "none"
    """Autocast dtype; float16 scales the loss with a GradScaler."""
    compile: str = "none"
    """Backend of torch.compile for the wrapped model, such as inductor; none: not compiled."""

    backend: Literal["auto", "gloo", "nccl", "mpi"] = "auto"
    """auto: nccl if every rank has a GPU of its own, else gloo. mpi: through mpi4py, under mpirun."""
    comm_device: Literal["auto", "cpu"] = "auto"
    """cpu: GPU parameters are sent through pinned memory."""
    timeout_seconds: float = 300.0
    """Longest wait for a peer; then the run ends with an error that names the peer."""
    num_threads: int = 1
    """Threads of each process. Another number changes results slightly, because sums are ordered by thread."""
    deterministic: bool = False
    """Deterministic CUDA kernels, for bit-identical resumption on a GPU; a CPU needs nothing."""

    elastic: bool = False
    """Workers may die, come back and be added while the others train on. Start each worker with the same command; all
    meet at --store; see docs/guides/elasticity_operating.md. A recipe that cannot do so raises an error with the
    reason."""
    membership: str = ""
    """An address at which workers meet: the same as --elastic with this --store."""
    min_workers: int = 1
    """Number of workers at the start; learning rate and epochs refer to this number."""
    max_workers: int = 0
    """Largest number of workers; more workers are not taken in. 0: no limit."""
    store: str = "127.0.0.1:29400"
    """host:port of `python -m gossip_modules.membership.serve`; or file:path, the file with its address. Keep
    this server running for longer than the workers. Several runs may share it: the name of --out-dir tells them
    apart. Or the address of a mailbox, which needs no server: s3://bucket/run, gs://, az://, file:///folder or
    store://host:port/run; see docs/guides/mailbox.md."""
    scale_lr: bool = False
    """Scale the learning rate with the number of training workers; otherwise it is always the rate of min_workers."""
    min_deadline: float = 1.0
    """The shortest time without a heartbeat, in seconds, before the others go on without a worker."""
    quorum: int = 0
    """Over a mailbox: the number of messages with which a round may close after --grace seconds; 0: more than half of
    --min-workers."""
    grace: float = 30.0
    """Over a mailbox: the most seconds that a round waits for workers after the quorum, and a worker for a round."""

    checkpoint_every: int = 0
    """Epochs from one checkpoint to the next; 0: only on a signal. With checkpoints, the last step has one."""
    checkpoint_every_steps: int = 0
    """Optimizer steps from one checkpoint to the next; 0: never within an epoch."""
    keep_last: int = 2
    """Newest checkpoints kept, next to the best one."""
    validate_every: int = 1
    """Epochs from one validation to the next; the last epoch is always validated."""
    log_every: int = 10
    """Optimizer steps from one point of TensorBoard and of the progress bar to the next."""

    OPTIMIZER: ClassVar[str] = "SGD"
    """The optimizer of the model, a class of torch.optim, if no option names one; see `optimizer_class`."""
    CHOICES: ClassVar[Mapping[str, Collection[object]]] = {
        "recipe": METHODS,
        "graph": [*GRAPHS, *PREDEFINED_GRAPHS, *TREES],
        "wire_dtype": [*WIRE_DTYPES, "auto"],
    }
    POSITIVE: ClassVar[tuple[str, ...]] = (
        *("epochs", "accumulation_steps", "gossip_every", "nprocs_per_node", "num_threads", "keep_last"),
        *("validate_every", "log_every", "timeout_seconds", "min_workers", "min_deadline", "grace"),
    )
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *("checkpoint_every", "checkpoint_every_steps", "average_every", "max_staleness", "clip_norm", "max_workers"),
        *("first_moment_period", "second_moment_period", "quorum"),
    )
    ZERO: ClassVar[Mapping[str, str]] = {"max_workers": "takes all", "quorum": "is more than half of min_workers"}
    """The meaning of 0 for options of `NOT_NEGATIVE` that 0 does not switch off."""
    SHARES: ClassVar[tuple[str, ...]] = ()
    """The options in (0, 1]."""
    BELOW_ONE: ClassVar[tuple[str, ...]] = ("label_smoothing",)
    """The options in [0, 1)."""
    IDENTITY: ClassVar[tuple[str, ...]] = (
        *("recipe", "algorithm", "accumulation_steps", "seed", "amp", "first_moment_period", "second_moment_period"),
        *WRAPPER_OPTIONS,
    )
    """The options that a run shares with every checkpoint it can go on from."""
    SETTINGS: ClassVar[tuple[str, ...]] = (
        *("label_smoothing", "clip_norm", "compile", "num_threads", "min_workers", "scale_lr"),
    )
    """The options that may change at a checkpoint, but make it another run."""
    GROUPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "general": ("recipe", "algorithm", "delay", "out_dir", "resume", "overwrite", "seed"),
        "training": ("epochs", "accumulation_steps", "label_smoothing", "clip_norm", "amp", "compile"),
        "average of the optimizer": ("first_moment_period", "second_moment_period"),
        "process": ("backend", "comm_device", "timeout_seconds", "num_threads", "deterministic"),
        "elastic": (
            *("elastic", "membership", "min_workers", "max_workers", "store", "scale_lr", "min_deadline"),
            *("quorum", "grace"),
        ),
        "checkpoint and log": (
            "checkpoint_every",
            "checkpoint_every_steps",
            "keep_last",
            "validate_every",
            "log_every",
        ),
    }
    """The groups of options in --help, beside those of methods; a task's fields in no group are its "task options"."""
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    """Defaults by the name for --preset; see train/command_line.py."""

    def __post_init__(self) -> None:
        self._choose_membership()
        self._choose_method()
        for name, choices in self.CHOICES.items():
            if name == "graph" and "(" in self.graph:
                read_graph(self.graph)
            elif getattr(self, name) not in choices:
                expected = ", ".join(map(str, choices))
                near = difflib.get_close_matches(str(getattr(self, name)), map(str, choices), n=1)
                remedy = f"did you mean {near[0]!r}?" if near else "see --help"
                raise ValueError(f"got {name}={getattr(self, name)!r}, expected one of {expected}; {remedy}")
        for name in self.POSITIVE:
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"got {name}={getattr(self, name)}, expected more than 0; see --help")
        for name in self.NOT_NEGATIVE:
            if not 0 <= getattr(self, name) < math.inf:
                meaning = self.ZERO.get(name, "switches it off")
                raise ValueError(f"got {name}={getattr(self, name)}, expected 0 or more; 0 {meaning}")
        for name in self.SHARES:
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"got {name}={getattr(self, name)}, expected 0 < {name} <= 1; 1 leaves nothing out")
        for name in self.BELOW_ONE:
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"got {name}={getattr(self, name)}, expected 0 <= {name} < 1; 0 switches it off")
        for name, value in ((option.name, getattr(self, option.name)) for option in fields(self)):
            if isinstance(value, float) and math.isnan(value):
                raise ValueError(f"got {name}=nan, expected a number; see --help")
        if self.seed < 0:
            raise ValueError(f"got seed={self.seed}, expected 0 or more; it seeds numpy's generators too")
        if METHODS[self.recipe].needs_sgd and self.optimizer_class != "SGD":
            has_sgd = "sgd" in self.CHOICES.get("optimizer", ())
            remedy = "pass --optimizer sgd" if has_sgd else "take a task that trains by SGD, such as train.gossip_sgd"
            raise ValueError(
                f"got recipe={self.recipe!r} where {self.optimizer_class} steps the model, expected one that takes "
                f"this optimizer: the momentum of SGD is part of {METHODS[self.recipe].title}; {remedy}, or take "
                "--recipe d2 or gradienttracking, which take any"
            )
        if self.schedule:
            schedule_of(self)
        self.moment_periods.check(self.recipe, self.optimizer_class, is_elastic=self.elastic, amp=self.amp)
        if self.elastic:
            self._check_elastic()

    def _choose_membership(self) -> None:
        """Set the options that --membership stands for."""
        if self.membership:
            if self.store not in (type(self).store, self.membership):
                raise ValueError(
                    f"got membership={self.membership!r} beside store={self.store!r}, expected one address; leave the "
                    "store out"
                )
            object.__setattr__(self, "elastic", True)
            object.__setattr__(self, "store", self.membership)
        if self.is_by_mail and (given := self._given(*_NOT_BY_MAIL)):
            raise ValueError(
                f"got {given} over a mailbox, expected none of them: any worker may come, and the run keeps its models "
                "itself; leave them out, and start a worker with the same address to go on"
            )
        if not self.is_by_mail and (given := self._given("quorum", "grace")):
            raise ValueError(
                f"got {given} without a mailbox, expected the address of one, whose rounds have them; pass "
                "--membership s3://bucket/run, for example, or leave them out"
            )

    def _given(self, *names: str) -> str:
        """The options with other values than their defaults, for errors."""
        given = [name for name in names if getattr(self, name) != getattr(type(self), name)]
        return ", ".join(f"{name}={getattr(self, name)}" for name in given)

    def _choose_method(self) -> None:
        """Check recipe and algorithm; set the recipe to the method's name, and a recipe's own algorithm to ""."""
        recipe = name_of(self.recipe)
        if self.algorithm:
            chosen = read_algorithm(self.algorithm, seed=self.seed)
            name = chosen.method.name
            if recipe not in (type(self).recipe, name):
                raise ValueError(
                    f"got recipe={self.recipe!r} beside algorithm={self.algorithm!r}, expected one of them; leave the "
                    "recipe out"
                )
            is_recipe = chosen.text == read_algorithm(name, seed=self.seed).text
            object.__setattr__(self, "algorithm", "" if is_recipe else self.algorithm)
            recipe = name
        object.__setattr__(self, "recipe", recipe)
        if self.delay and recipe in METHODS:
            object.__setattr__(self, "algorithm", self._with_delay(read_algorithm(self.algorithm or recipe)).text)

    def _with_delay(self, chosen: Chosen) -> Chosen:
        if "delay" not in chosen.method.settings:
            outer = ", ".join(name for name, method in METHODS.items() if "delay" in method.settings)
            raise ValueError(
                f"got delay={self.delay!r} with {chosen.method.title}, expected one of {outer}, which have outer "
                "steps; leave it out, or take --overlap auto"
            )
        return chosen.with_settings({"delay": int(self.delay) if self.delay.isdecimal() else self.delay})

    def _check_elastic(self) -> None:
        why = METHODS[self.recipe].needs_fixed_ranks
        if not why and self.nprocs_per_node != 1:
            why = f"the scripts start each process as a worker, here with nprocs_per_node={self.nprocs_per_node}"
        if not why and (self.overlap == "auto" or "auto" in (self.delay, self.wire_dtype)):
            why = "workers that join later have measured no round, as overlap=auto and delay=auto ask for"
        if why:
            raise ValueError(
                f"got --elastic with --recipe {self.recipe}, expected a method and options that start with workers "
                "that come and go; take another recipe such as sgp, or leave --elastic or the option out. Cause: "
                f"{why}"
            )
        if self.max_workers and self.max_workers < self.min_workers:
            raise ValueError(
                f"got max_workers={self.max_workers} and min_workers={self.min_workers}, expected no fewer; 0 takes all"
            )
        if self.backend not in ("auto", "gloo"):
            raise ValueError(f"got --elastic with --backend {self.backend}, expected gloo: its links can be replaced")

    @cached_property
    def chosen(self) -> Chosen:
        """The method with its arguments."""
        return read_algorithm(self.algorithm or self.recipe, seed=self.seed)

    @cached_property
    def weighs_losses(self) -> bool:
        """Whether dpwa merges by losses; ranks report them then."""
        arguments = self.chosen.arguments
        by_loss = isinstance(arguments.get("interpolation"), LossInterpolation)
        return by_loss or arguments.get("divergence_threshold", 0.0) > 0

    @property
    def optimizer_class(self) -> str:
        """The optimizer of the model, a class of torch.optim. Recipes that need SGD are refused with any other one."""
        return self.OPTIMIZER

    @property
    def moment_periods(self) -> MomentPeriods:
        """The periods of averages of the optimizer's moments over all ranks."""
        return MomentPeriods(self.first_moment_period, self.second_moment_period)

    @property
    def is_by_mail(self) -> bool:
        """Whether workers meet over a mailbox, as the address says: see `gossip_modules.Membership`."""
        return self.elastic and "://" in self.store

    @property
    def num_founders(self) -> int:
        """The number of steps of all workers for each counted step: min_workers with --elastic, otherwise 1."""
        return self.min_workers if self.elastic else 1

    @property
    @abstractmethod
    def subject(self) -> str:
        """The data of the run, for the name of a folder."""

    def resolved(self, world: World) -> Self:
        """Return these options, with values for those that depend on the machines."""
        return self

    @property
    def identity(self) -> dict[str, Any]:
        """The options that a run shares with every checkpoint it can go on from, plain JSON values.

        An option without a use in the recipe has its default here: it makes no other run.
        """
        config = without_unused(METHODS[self.recipe], self)
        identity = {name: _plain(getattr(config, name)) for name in self.IDENTITY}
        if self.algorithm:
            chosen = read_algorithm(self.algorithm)
            identity["algorithm"] = chosen.text
            if plan := chosen.arguments.get("plan"):  # the plan itself, wherever its file lies
                identity["algorithm"] = f"MATCHA({MatchaGraph.from_plan(plan)})"
        return identity

    @property
    def defaults(self) -> dict[str, Any]:
        """The defaults of the options of `identity`; plain JSON values."""
        return {name: _plain(getattr(type(self), name)) for name in self.IDENTITY}

    @property
    def settings(self) -> dict[str, Any]:
        """The options that may change at a checkpoint, but make it another run; plain JSON values."""
        return {name: _plain(getattr(self, name)) for name in self.SETTINGS}

    def check_preset(self, preset: Mapping[str, Any]) -> None:
        """Raise ValueError if the values of a preset do not fit the other options."""

    @property
    def used_choices(self) -> dict[str, Any]:
        """The options of this run, the recipe first, without those that the recipe does not use."""
        unused = {*WRAPPER_OPTIONS} - METHODS[self.recipe].options
        names = ["recipe", *(option.name for option in fields(self) if option.name not in unused)]
        return {name: getattr(self, name) for name in names}

    @property
    def unused_choices(self) -> dict[str, Any]:
        """The given options without a use in the recipe's wrapper."""
        return {name: getattr(self, name) for name in unused_options(METHODS[self.recipe], self)}

    @property
    def run_dir(self) -> Path:
        """The folder of this run's files."""
        return Path(self.out_dir or f"runs/{self.subject}_{self.recipe}")


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
