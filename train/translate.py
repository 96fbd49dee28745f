r"""Train a Transformer to translate, by AllReduce SGD, D-PSGD, SGP, Overlap SGP, CHOCO-SGD,
AD-PSGD, WAGMA-SGD, ...

    # Number words, in under two minutes
    torchrun --standalone --nproc-per-node 4 -m train.translate
    torchrun --standalone --nproc-per-node 4 -m train.translate --recipe ar    # or another recipe
    python -m train.translate --source fr --target de  # a world of one, another language
    python -m train.translate --help

    # Multi30k, or any two files train.en and train.de beside val.* and test*.*, plain or .gz
    torchrun --standalone --nproc-per-node 4 -m train.translate --preset multi30k \
        --data-dir data/multi30k
    # WMT'16 as Moses' scripts leave it, 400k tokens a batch on eight machines; see job_scripts/
    torchrun --nnodes 8 --nproc-per-node 1 ... -m train.translate --preset wmt16-big \
        --data-dir data/wmt16_en_de --amp bfloat16 --resume auto

A run writes to --out-dir. It leaves the files of train/gossip_sgd.py, the translations of the test
set by the averaged model in translations.<language>, and tokenizer.json. Notes of that script on
signals, resumption and the steps of asynchronous ranks hold here too. A finished run translates
standard input:

    echo "four hundred and twelve" | python -m train.translate_text runs/numbers_en_de_sgp

Every rank's own model is measured on the test set (negative log-likelihood in nats per token), the
averaged one by BLEU, chrF and exact matches as well. Of the checkpoints the one with the least
negative log-likelihood on the validation set is kept.
"""

from __future__ import annotations

import sys
from pathlib import Path

# Run by path, Python looks for modules beside this file; they are one level up, where gossip_modules is as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.command_line import main
from train.tasks.translation.config import TranslationConfig
from train.tasks.translation.task import TranslationTask

if __name__ == "__main__":
    main(TranslationConfig, TranslationTask, description=__doc__)
