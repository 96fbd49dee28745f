r"""Train an image classifier by gossip: D-PSGD, SGP, Overlap SGP; with fewer bytes: MATCHA,
CHOCO-SGD, DeepSqueeze, Moniqua, PowerGossip; without waiting for the slowest: AD-PSGD, WAGMA-SGD,
dpwa; or, to compare with, by AllReduce SGD and Local SGD.

    # Handwritten digits, in seconds
    torchrun --standalone --nproc-per-node 4 -m train.gossip_sgd --recipe sgp
    torchrun --standalone --nproc-per-node 4 -m train.gossip_sgd --recipe osgp --max-staleness 1
    torchrun --standalone --nproc-per-node 8 -m train.gossip_sgd --graph matcha0 \
        --algorithm "MATCHA(budget=0.5)"
    torchrun --standalone --nproc-per-node 4 -m train.gossip_sgd \
        --algorithm "Choco(TopK(0.01), step_size=0.0375)"
    torchrun --standalone --nproc-per-node 4 -m train.gossip_sgd \
        --algorithm "DiLoCo(sync_every=50)"
    torchrun --standalone --nproc-per-node 4 -m train.gossip_sgd --recipe adpsgd
    torchrun --standalone --nproc-per-node 4 -m train.gossip_sgd \
        --algorithm "WAGMA(group_size=2, sync_period=10)"
    python -m train.gossip_sgd  # a world of one
    python -m train.gossip_sgd --help

    # CIFAR-10 as a folder of images
    torchrun --standalone --nproc-per-node 4 -m train.gossip_sgd --dataset imagefolder \
        --data-dir data/cifar10 --model resnet20 --epochs 60 --milestones 30 45 \
        --lr 0.2 --weight-decay 5e-4 --checkpoint-every 5
    # ImageNet, on every machine; see job_scripts/
    torchrun --nnodes 4 --nproc-per-node 8 ... -m train.gossip_sgd --preset imagenet-resnet50 \
        --data-dir /data/imagenet --amp bfloat16 --compile inductor --nprocs-per-node 8 \
        --peers-per-itr 0:2,30:1 --resume auto

Everything goes to --out-dir: one CSV per rank, tensorboard/, checkpoints/, and at the end
summary.json, curves.png and averaged_model.safetensors (train/training/export.py says how to load
it).
The last line on standard output is `averaged model: test accuracy NN.NN %`.

A folder that has an earlier run is refused, unless this one goes on from there (--resume auto) or
is to delete it (--overwrite). What you can mend is one line of rank 0, "error: got ..., expected
...", and exit code 2.

SIGTERM or SIGUSR1 to any training process: at the next iteration all ranks write a checkpoint and
leave with code 75; start the same command again with --resume auto. torchrun itself returns 1 then,
whatever their code, and lists it, 75, for every process. It passes a SIGTERM of its own on to them
and allows them 30 seconds (TORCH_ELASTIC_SHUTDOWN_TIMEOUT). SIGUSR1 kills it and leaves them behind
without it, unless it was started with `torchrun --signals-to-handle SIGTERM,SIGINT,SIGUSR1`, as
job_scripts/launch.sh does: then it passes that on as well. A resumed run of a synchronous recipe
(without --overlap, not osgp, adpsgd, wagma or dpwa) is bit-identical to one that never stopped;
otherwise what is in flight is waited for before a checkpoint, and nothing is lost.

When a worker dies, `torchrun --max-restarts 3 ... --resume auto --checkpoint-every-steps 500`
starts all workers again; they go on from the newest checkpoint that is whole on all ranks, and
those passed over are named with the reason.

With adpsgd and dpwa ranks share the steps of the run, fast ones taking more; with wagma slow ranks
skip rounds. So "step" in what follows counts the steps per rank of the whole run, and all ranks
meet at the end of each epoch and for each checkpoint, nowhere else.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run by path, Python looks for modules beside this file; they are one level up, where gossip_modules is as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.command_line import main
from train.tasks.images.config import Config
from train.tasks.images.task import ImageTask

if __name__ == "__main__":
    main(Config, ImageTask, description=__doc__)
