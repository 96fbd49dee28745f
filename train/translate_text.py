r"""Translate lines of text with the model that a finished run of train/translate.py has left.

    echo "four hundred and twelve" | python -m train.translate_text runs/numbers_en_de_sgp
    python -m train.translate_text runs/multi30k_en_de_sgp \
        --beam-size 8 < sentences.en > sentences.de

Reads a sentence per line, UTF-8, and writes its translation, in the same order; a blank line stays
one.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import tyro
from safetensors import SafetensorError, safe_open

# Run by path, Python looks for modules beside this file; they are one level up, where gossip_modules is as well.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from train.job.errors import UsageError, refuse, usage_errors
from train.job.outputs import EXPORT, TOKENIZER
from train.tasks.byte_tokenizer import PAD
from train.tasks.translation.parallel_text import lines_of
from train.tasks.translation.token_batches import by_length
from train.tasks.translation.token_sequences import Sequences
from train.tasks.translation.tokenization import BytePairs
from train.tasks.translation.transformer import SIZES, Beam, Translator
from visualization.command import read_arguments

LINES_AT_ONCE = 1000
"""That are sorted by length and translated before the first of them is written."""
BATCH_TOKENS = 4096


@dataclass(frozen=True)
class Arguments:
    """Translate standard input to standard output."""

    run: tyro.conf.Positional[Path]
    """Folder of a finished run."""
    beam_size: int = 0
    """Hypotheses that a translation is chosen from; 0: as many as in training."""
    device: str = "cpu"
    """Where to compute, such as cuda."""


@dataclass(frozen=True)
class TrainedTranslator:
    """The averaged model of a run, with all that it takes to use it.

    Args:
        translator: in eval mode.
        tokenizer: the tokenizer of both languages.
        beam: how to search.
        max_length: the most tokens of a sentence; what is longer is cut.
        device: where `translator` is.
    """

    translator: Translator
    tokenizer: BytePairs
    beam: Beam
    max_length: int
    device: torch.device

    @classmethod
    def load(cls, run: Path, *, beam_size: int = 0, device: str = "cpu") -> TrainedTranslator:
        """What a finished run has left in the folder `run`; see `Arguments`.

        Raises:
            ValueError: there is none, or it is of something else than translation; or the beam has a negative size.
        """
        if beam_size < 0:
            raise ValueError(f"got beam_size={beam_size}, expected 0 or more; 0 is that of the training")
        try:
            with safe_open(run / EXPORT, framework="pt") as file:
                about: Mapping[str, str] = file.metadata() or {}
                state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
        except (OSError, SafetensorError) as error:
            raise ValueError(
                f"got {run / EXPORT}: {error}, expected the model of a finished run; name its folder"
            ) from error
        if about.get("model") not in SIZES:
            raise ValueError(
                f"got {run / EXPORT} of a model {about.get('model')!r}, expected one of {', '.join(SIZES)}, as "
                "train/translate.py trains; name another run"
            )
        max_length = int(about["max_length"])
        translator = Translator(
            SIZES[about["model"]], num_tokens=int(about["num_tokens"]), max_length=max_length, dropout=0.0
        )
        translator.load_state_dict(state)
        return cls(
            translator.to(device).eval(),
            BytePairs.load(run / TOKENIZER),
            Beam(beam_size or int(about["beam_size"]), float(about["length_penalty"]), max_length),
            max_length,
            torch.device(device),
        )

    def __call__(self, sentences: Sequence[str]) -> list[str]:
        """The translation of each sentence."""
        sources = Sequences.of(self.tokenizer.encode(sentences), max_length=self.max_length)
        translations = [""] * len(sentences)
        for places in by_length(sources.lengths, BATCH_TOKENS):
            source = sources.padded(places).to(self.device)
            with torch.no_grad():
                found = self.translator.translate(source, source != PAD, self.beam)
            for place, text in zip(places.tolist(), self.tokenizer.decode(found), strict=True):
                translations[place] = text if sentences[place] else ""
        return translations


def translate_lines(lines: Iterable[str], translator: TrainedTranslator) -> Iterator[str]:
    """The translation of each line, without its end, in order."""
    lines = iter(lines)
    while chunk := list(islice(lines, LINES_AT_ONCE)):
        yield from translator([" ".join(line.split()) for line in chunk])


if __name__ == "__main__":
    arguments = read_arguments(Arguments, description=__doc__)
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    try:
        with usage_errors():
            translator = TrainedTranslator.load(arguments.run, beam_size=arguments.beam_size, device=arguments.device)
            for line in translate_lines(lines_of(sys.stdin.buffer, "standard input"), translator):
                print(line, flush=True)
    except UsageError as error:
        refuse(error, 0)
