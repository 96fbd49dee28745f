"""Config: every choice of an image classification run, one frozen dataclass, filled from the command line by tyro."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from train.job.world import World
from train.run_config import RunConfig
from train.tasks.images.data import DATASETS
from train.tasks.images.models import MODELS
from train.tasks.momentum_sgd import check_sgd


@dataclass(frozen=True)
class Config(RunConfig):
    """Train an image classifier by gossip. The defaults train handwritten digits by SGP within a minute."""

    dataset: str = "digits"
    """digits (inside scikit-learn), cifar10, imagefolder (a tree with train/ and val/ or test/)."""
    data_dir: str = "data"
    """Folder of the data set; digits needs none. Of cifar10 also an archive: the batches of its authors, for Python or
    binary, or train/ and test/ with a folder of images for each class, as folders or in an archive."""
    download: bool = False
    """Let torchvision fetch cifar10 into data_dir."""
    image_size: int = 0
    """Side of the images of an imagefolder in pixels; 0: 224 for resnet50, else 32."""
    dirichlet_alpha: float = 0.0
    """Non-IID shards: each rank's class mix is drawn from Dirichlet(alpha); small is uneven; 0: IID."""
    num_workers: int = 0
    """Loader processes per rank; the images do not depend on it."""

    model: str = "cnn"
    """cnn (small), resnet20 (32x32), resnet50 (torchvision)."""
    channels_last: bool = True
    """Memory format of images and convolutions."""
    batch_size: int = 32
    """Images per rank and optimizer step."""
    images_per_node: int = 0
    """Images per machine and optimizer step, shared evenly by its ranks, in the place of batch_size; 0: batch_size."""
    lr: float = 0.4
    """Learning rate for a global batch of 256; scaled linearly with the global batch."""
    warmup_epochs: int = 1
    """Epochs of linear warm-up, moved every iteration."""
    warmup_lr: float = 0.0
    """Where the warm-up starts, unless the target is lower; 0: at the smaller of lr and a tenth of the target."""
    milestones: tuple[int, ...] = (15, 22)
    """Epochs after which the learning rate is multiplied by milestone_factor."""
    milestone_factor: float = 0.1
    """What a milestone multiplies the learning rate by."""
    momentum: float = 0.9
    """Of SGD; 0: none."""
    nesterov: bool = True
    """Nesterov's form of the momentum."""
    weight_decay: float = 5e-4
    """Of weight matrices and kernels; biases and normalisation are left alone."""
    decay_all: bool = False
    """Decay biases and normalisation as well, as the code of the SGP paper did; Goyal et al. left them alone."""

    CHOICES: ClassVar[Mapping[str, Collection[object]]] = {**RunConfig.CHOICES, "dataset": DATASETS, "model": MODELS}
    POSITIVE: ClassVar[tuple[str, ...]] = (*RunConfig.POSITIVE, "batch_size", "lr")
    NOT_NEGATIVE: ClassVar[tuple[str, ...]] = (
        *RunConfig.NOT_NEGATIVE,
        *("images_per_node", "warmup_epochs", "dirichlet_alpha", "weight_decay", "image_size", "num_workers"),
        *("milestone_factor", "warmup_lr"),
    )
    ZERO: ClassVar[Mapping[str, str]] = {
        **RunConfig.ZERO,
        "images_per_node": "takes --batch-size",
        "image_size": "is what the model is made for",
        "num_workers": "loads images in the process that trains",
        "milestone_factor": "ends learning at a milestone",
        "warmup_lr": "starts at the smaller of lr and a tenth of the target",
    }
    BELOW_ONE: ClassVar[tuple[str, ...]] = (*RunConfig.BELOW_ONE, "momentum")
    IDENTITY: ClassVar[tuple[str, ...]] = (
        *RunConfig.IDENTITY,
        *("dataset", "model", "image_size", "batch_size", "dirichlet_alpha"),
    )
    SETTINGS: ClassVar[tuple[str, ...]] = (
        *RunConfig.SETTINGS,
        *("lr", "warmup_epochs", "warmup_lr", "milestones", "milestone_factor"),
        *("momentum", "nesterov", "weight_decay", "decay_all", "channels_last"),
    )
    GROUPS: ClassVar[Mapping[str, tuple[str, ...]]] = {
        **RunConfig.GROUPS,
        "data": ("dataset", "data_dir", "download", "image_size", "dirichlet_alpha", "num_workers"),
        "model": ("model", "channels_last"),
        "optimizer": (
            *("batch_size", "images_per_node", "lr", "warmup_epochs", "warmup_lr", "milestones", "milestone_factor"),
            *("momentum", "nesterov", "weight_decay", "decay_all"),
        ),
    }
    PRESETS: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        # Assran et al., ICML 2019, arXiv 1811.10792, section 6: the recipe of Goyal et al., arXiv 1706.02677, for which
        # a node with all its GPUs takes 256 images per step.
        "imagenet-resnet50": {
            "dataset": "imagefolder",
            "model": "resnet50",
            "images_per_node": 256,
            "epochs": 90,
            "lr": 0.1,
            "warmup_epochs": 5,
            "warmup_lr": 0.1,
            "milestones": (30, 60, 80),
            "milestone_factor": 0.1,
            "momentum": 0.9,
            "nesterov": True,
            "weight_decay": 1e-4,
            "label_smoothing": 0.0,
            "num_workers": 4,
            "checkpoint_every": 1,
            "log_every": 100,
        },
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(milestone <= 0 for milestone in self.milestones):
            raise ValueError(f"got milestones={self.milestones}, expected epochs after the first; --lr is for it")
        if list(self.milestones) != sorted(self.milestones):
            raise ValueError(f"got milestones={self.milestones}, expected ascending epochs; sort them")
        check_sgd(
            self.recipe,
            momentum=self.momentum,
            nesterov=self.nesterov,
            first_moment_period=self.first_moment_period,
        )
        if self.elastic and self.dirichlet_alpha:
            raise ValueError(
                f"got dirichlet_alpha={self.dirichlet_alpha} with --elastic, expected 0: workers share all images, and "
                "none has classes of its own"
            )
        if self.images_per_node and self.batch_size != type(self).batch_size:
            raise ValueError(
                f"got batch_size={self.batch_size} and images_per_node={self.images_per_node}, expected one of them; "
                "for a batch per rank give --images-per-node 0 as well"
            )
        if not self.images_per_node and self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"got batch_size={self.batch_size} and accumulation_steps={self.accumulation_steps}, expected a "
                "batch that cuts into equal micro-batches; choose a divisor of the batch size"
            )

    @property
    def subject(self) -> str:
        """See `RunConfig`."""
        return self.dataset

    def resolved(self, world: World) -> Config:
        """With the batch of a rank, where that of a machine was given.

        Raises:
            ValueError: the ranks of this machine cannot share it evenly.
        """
        if not self.images_per_node:
            return self
        if self.images_per_node % world.local_size:
            raise ValueError(
                f"got images_per_node={self.images_per_node} for {world.local_size} ranks on this machine, expected a "
                "multiple; change one, or give --batch-size and --images-per-node 0"
            )
        return replace(self, batch_size=self.images_per_node // world.local_size, images_per_node=0)
