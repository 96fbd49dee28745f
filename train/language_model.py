r"""Train a language model, by AllReduce SGD, D-PSGD, SGP, Overlap SGP, CHOCO-SGD, PowerGossip,
AD-PSGD, WAGMA-SGD, ...

    # The sources of Python's own standard library, in under two minutes; no file needed
    torchrun --standalone --nproc-per-node 4 -m train.language_model
    torchrun --standalone --nproc-per-node 4 -m train.language_model --recipe powergossip
    torchrun --standalone --nproc-per-node 4 -m train.language_model --model lstm-tiny
    torchrun --standalone --nproc-per-node 4 -m train.language_model --recipe qgdsgdm \
        --optimizer sgd --dirichlet-alpha 0.1  # ranks learn from different folders
    torchrun --standalone --nproc-per-node 4 -m train.language_model --vocabulary-size 259  # bytes
    python -m train.language_model  # a world of one
    python -m train.language_model --help

    # Any text files: some called train.* and valid.*, or split by the hashes of their names
    torchrun --standalone --nproc-per-node 4 -m train.language_model --data-dir notes \
        --files '*.md' '*.txt'
    # The LSTM of the paper of PowerGossip on the files of WikiText-2
    torchrun --standalone --nproc-per-node 4 -m train.language_model --preset wikitext2-lstm \
        --data-dir data/wikitext-2 --recipe powergossip --graph ring
    # GPT-2, half a million tokens a step on eight GPUs; see job_scripts/
    torchrun --nnodes 8 --nproc-per-node 1 ... -m train.language_model --preset gpt2 \
        --data-dir /data/text --resume auto

Everything goes to --out-dir: what train/gossip_sgd.py leaves there, whose notes on signals,
resumption and the steps of asynchronous ranks hold here too; and tokenizer.json.

Each rank learns from its own share of the training text. Every rank's own model and the averaged
one are measured on the validation text: negative log-likelihood in nats per token, perplexity,
which is its exponential, and bits per byte, which do not depend on the tokenizer. Of the
checkpoints the one with the fewest bits per byte is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run by path, Python looks for modules beside this file; they are one level up, where gossip_modules is as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.command_line import main
from train.tasks.language_model.config import LanguageModelConfig
from train.tasks.language_model.task import LanguageModelTask

if __name__ == "__main__":
    main(LanguageModelConfig, LanguageModelTask, description=__doc__)
