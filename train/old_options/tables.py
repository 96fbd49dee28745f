"""The options of the scripts of SGP, AD-PSGD, MATCHA, WAGMA-SGD, PowerGossip and dpwa, and what becomes of each."""

from __future__ import annotations

import re
from collections.abc import Mapping

from train.old_options.actions import (
    Action,
    Gone,
    Same,
    Without,
    factors,
    flag,
    named,
    one_of,
    only,
    peers,
    powergossip_task,
    staleness,
)

_LAUNCHER = "start with torchrun, mpirun or srun, which tell each process its rank and the address of rank 0"

SGP: Mapping[str, Action] = {
    "all_reduce": flag({"recipe": "ar"}, {}, "--recipe ar"),
    "push_sum": flag({"recipe": "sgp"}, {"recipe": "dpsgd"}, "--recipe sgp (True), --recipe dpsgd (False)"),
    "bilat": flag({"recipe": "adpsgd"}, {}, "--recipe adpsgd"),
    "graph_type": one_of(
        "graph",
        {
            "-1": None,
            "0": "exponential",
            "1": "bipartite-exponential",
            "2": "linear",
            "3": "bipartite-linear",
            "4": "ring",
            "5": "npeer-exponential",
        },
    ),
    "mixing_strategy": only(("0", "-1"), "pass mixing= to GossipDataParallel; the scripts mix uniformly"),
    "synch_freq": Same(staleness, "--max-staleness, with --overlap"),
    "ps_weight": Gone("leave it out: the push-sum weight starts at 1, and the wrapper keeps and saves it"),
    "num_dataloader_workers": named("num_workers"),
    "num_epochs": named("epochs"),
    "num_iterations_per_training_epoch": Gone("pass fewer --epochs or a smaller data set"),
    "peers_per_itr_schedule": Same(peers, "--peers-per-itr EPOCH:PEERS,..."),
    "warmup": flag({"warmup_epochs": "5"}, {"warmup_epochs": "0"}, "--warmup-epochs 5 (True), 0 (False)"),
    "print_freq": named("log_every"),
    "verbose": Without("there is no other level of messages"),
    "train_fast": flag({"validate_every": "1000000"}, {}, "--validate-every, more than --epochs"),
    "checkpoint_all": only(("True", ""), "leave it out: every rank writes the part of a checkpoint that is its own"),
    "overwrite_checkpoints": only(("True", ""), "pass --keep-last N, the number of checkpoints that are kept"),
    "checkpoint_dir": named("out_dir"),
    "tag": Gone("pass another --out-dir for each run; names of files have no prefix"),
    "dataset_dir": Same(
        lambda value: {"dataset": "imagefolder", "data_dir": value}, "--dataset imagefolder --data-dir"
    ),
    "ddp_backend": Gone("leave it out; --backend names the backend of torch.distributed"),
    "master_port": Gone(f"{_LAUNCHER}, as in torchrun --master-port"),
    "network_interface_type": Gone(
        "set GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME, or NETWORK_INTERFACE of job_scripts/"
    ),
    "num_itr_ignore": Without("times are in the table of each rank, from the first step on"),
    "no_cuda_streams": Without("the library chooses its streams"),
    "single_threaded": flag({}, {}, "(left out: a round runs in the training thread unless --overlap says otherwise)"),
    "distributed": only(("True", ""), "start python -m train.gossip_sgd without a launcher for a world of one"),
    "resume_epoch": Gone("pass --resume FOLDER, of a run or of one of its checkpoints"),
    "bs_fpath": Gone("start the same command again with --resume auto; job_scripts/ does so after a preemption"),
    "shared_fpath": Without("ranks count their steps together in the store of the job"),
    "user_name": Without("jobs are submitted by job_scripts/"),
    "dist_avg": one_of("recipe", {"allreduce": "ar", "allreduce2": "ar", "gossip": "sgp", "simple_gossip": "sgp"}),
    "dist_process": Gone("pass --nprocs-per-node N, the number of processes that average gradients and gossip as one"),
}
"""Of gossip_sgd.py and gossip_sgd_adpsgd.py of Stochastic Gradient Push, and of its fairseq scripts; options of the
same name and meaning, such as --lr and --momentum, are left out."""

MATCHA: Mapping[str, Action] = {
    "matcha": flag({"recipe": "matcha"}, {}, "--recipe matcha", "--lr is for a global batch of 256 here"),
    "graphid": Same(lambda value: {"graph": f"matcha{value}"}, "--graph matcha0 to matcha5"),
    "compress": flag(
        {"recipe": "choco", "compressor": "topk", "compression_ratio": "0.1"},
        {},
        "--algorithm 'Choco(TopK(0.1), step_size=0.1)'",
    ),
    "consensus_lr": Same(lambda value: {"step_size": value}, "the step_size of --algorithm 'Choco(...)'"),
    "bs": named("batch_size"),
    "epoch": named("epochs"),
    "randomSeed": named("seed"),
    "savePath": named("out_dir"),
    "datasetRoot": named("data_dir"),
    "description": Without("it is text for a file of notes"),
    "name": Gone("pass --out-dir FOLDER, which names a run; a worker of dpwa gets its name from its rank"),
    "n": Gone("pass --out-dir FOLDER, which names a run"),
    "p": Without("it has no effect in MATCHA's script either"),
}
"""Of train_mpi.py of MATCHA."""

WAGMA: Mapping[str, Action] = {
    "solo": Gone("pass --recipe wagma"),
    "hvd": Gone("pass --recipe ar"),
    "lars": Gone(
        "train by SGD, which train.gossip_sgd has, or take the wrapper in a script with an optimizer of yours"
    ),
    "xla": Gone("pass --compile inductor"),
    "regime": Gone("pass --preset imagenet-resnet50, or --milestones, --milestone-factor and --warmup-epochs"),
    "lrmult": Gone("pass --lr, the learning rate for a global batch of 256"),
    "dwu": Gone("pass --warmup-epochs 0"),
    "start_epoch": Gone("pass --resume FOLDER, of a run or of one of its checkpoints"),
    "aug": Gone("leave it out: training images are cropped or shifted, and mirrored"),
    "saug": Gone("leave it out: training images are cropped or shifted, and mirrored"),
    "tas": Gone("pass --algorithm 'WAGMA(group_size=4, sync_period=10)'"),
}
"""Of the ResNet-50 script of WAGMA-SGD, with one dash."""

DPWA: Mapping[str, Action] = {
    "config_file": Gone(
        "pass --recipe dpwa: workers are ranks, and find each other through the launcher; "
        "PairwiseConfig.from_yaml(name, file) reads the file in a script of yours"
    ),
    "r": Gone("pass --resume auto"),
}
"""Of main.py of dpwa."""

OTHERS: Mapping[str, Action] = {
    "alpha": Gone(
        "say which one is meant: --dirichlet-alpha for uneven data; MATCHA plans its own weight of a link; "
        "in dpwa --algorithm 'Dpwa(interpolation=ConstantInterpolation(0.5))' has the share of the peer's model"
    ),
    "world_size": Gone(_LAUNCHER),
    "rank": Gone(_LAUNCHER),
    "local_rank": Gone(_LAUNCHER),
    "master_addr": Gone(_LAUNCHER),
    "n_workers": Gone(_LAUNCHER),
    "consensus_target": Gone("take --algorithm 'SlowMo(4, momentum=0.4)', or --average-every 8"),
    "consensus_remedy": Gone("leave it out with --consensus-target"),
}
"""Of several scripts, of arguments that scripts have elsewhere, and of version 0.1 of this project."""

_POWERGOSSIP_LR = (
    "set lr, which is for a global batch of 256 and grows with the batch: learning_rate x distributed_lr_warmup_factor "
    "x 256 / (batch_size x n_workers)"
)
_SPECTRUM = Without("singular values are not logged")
POWERGOSSIP_METHODS: Mapping[str, str] = {
    "dpsgd": "dpsgd",
    "all-reduce": "ar",
    "power-gossip": "powergossip",
    "choco": "choco",
    "deepsqueeze": "deepsqueeze",
    "moniqua": "moniqua",
}
POWERGOSSIP: Mapping[str, Action] = {
    "optimizer": one_of("recipe", POWERGOSSIP_METHODS),
    "optimizer_rank": Same(lambda value: {"power_rank": value}, 'algorithm="PowerGossip(rank=...)"'),
    "optimizer_num_iterations": Same(
        lambda value: {"power_iterations": value}, 'algorithm="PowerGossip(num_iterations=...)"'
    ),
    "optimizer_warm_start": Same(lambda value: {"warm_start": value}, 'algorithm="PowerGossip(warm_start=...)"'),
    "optimizer_diffusion_rate": Same(lambda value: {"step_size": value}, "the step_size of the algorithm"),
    "optimizer_compressor": one_of("compressor", {"top-k": "topk", "sign-and-norm": "sign"}),
    "optimizer_keep_ratio": Same(
        lambda value: {"compression_ratio": value}, 'algorithm="Choco(TopK(...), step_size=...)"'
    ),
    "optimizer_theta": Same(lambda value: {"theta": value}, 'algorithm="Moniqua(theta=...)"'),
    "optimizer_round_weights": Gone("leave it out: the graph has the weights"),
    "topology": one_of("graph", {"ring": "ring", "torus": "torus", "fully-connected": "complete"}),
    "num_epochs": named("epochs"),
    "learning_rate": Gone(_POWERGOSSIP_LR),
    "distributed_lr_warmup_factor": Gone(_POWERGOSSIP_LR),
    "distributed_lr_warmup_epoch": named("warmup_epochs"),
    "lr_schedule_milestones": Same(
        lambda value: factors(" ".join(re.findall(r"[\d.]+", value))), "milestones and milestone_factor"
    ),
    "distributed_backend": named("backend"),
    "distributed_init_file": Gone(_LAUNCHER),
    "task": Same(powergossip_task, 'dataset="cifar10" and model="resnet20" (Cifar), task="language_model" (LSTM)'),
    "task_architecture": one_of("model", {"ResNet20": "resnet20", "resnet20": "resnet20"}),
    "use_decentralized_data": Gone("set dirichlet_alpha, small for uneven data"),
    "decentralized_data_shuffled_ratio": Gone("set dirichlet_alpha, small for uneven data"),
    "evaluate_average_model": Without("the averaged model is always evaluated"),
    "spectrum_logging_epochs": _SPECTRUM,
    "spectrum_logging_params": _SPECTRUM,
}
"""The keys of `train.config` of PowerGossip that differ; the launcher tells n_workers and rank."""

OPTIONS: Mapping[str, Action] = {**OTHERS, **DPWA, **WAGMA, **MATCHA, **SGP}
"""Of all command lines. An option of today with a value as of old is in `translate`."""

_METHODS = ("all_reduce", "bilat", "compress", "matcha", "push_sum")
"""Those that choose the method, the first that is given: --all_reduce True --push_sum False is AllReduce SGD."""
