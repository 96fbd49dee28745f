"""Number words: a corpus that needs no file. "four hundred and twelve" is "vierhundertzwölf" in German.

The words come from the library num2words, in any two of its languages. They are a language in small: composed, with
an order of their own (German says the ones before the tens), and with one right translation each.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from train.tasks.translation.parallel_text import Corpus, ListedText, Pair

LARGEST = 999_999
NUM_HELD_OUT = 500
"""Numbers of the validation set, and as many of the test set."""


def number_words(source: str, target: str, *, num_train: int) -> Corpus:
    """Numbers from 0 to 999,999 in two languages: always the same held-out ones, and `num_train` others.

    Args:
        source: language translated from, by its code in num2words, such as en or pt_BR.
        target: language translated into.
        num_train: training pairs.

    Raises:
        ValueError: num2words has no such language, or there are not so many numbers.
    """
    if not 0 < num_train <= LARGEST + 1 - 2 * NUM_HELD_OUT:
        raise ValueError(
            f"got num_numbers={num_train}, expected 1 to {LARGEST + 1 - 2 * NUM_HELD_OUT}: the rest is held out"
        )
    in_source, in_target = _speaker(source), _speaker(target)
    numbers = np.random.default_rng(0).permutation(LARGEST + 1)[: 2 * NUM_HELD_OUT + num_train].tolist()
    pairs = [Pair(in_source(number), in_target(number)) for number in numbers]
    parts = pairs[:NUM_HELD_OUT], pairs[NUM_HELD_OUT : 2 * NUM_HELD_OUT], pairs[2 * NUM_HELD_OUT :]
    validation, test, train = map(ListedText, parts)
    return Corpus(train, validation, test)


def _speaker(language: str) -> Callable[[int], str]:
    """Says a number in words."""
    from num2words import CONVERTER_CLASSES

    if language not in CONVERTER_CLASSES:
        raise ValueError(
            f"got language {language!r}, expected one that num2words speaks ({', '.join(sorted(CONVERTER_CLASSES))}); "
            "for other text name its folder with --data-dir"
        )
    converter = CONVERTER_CLASSES[language]

    def say(number: int) -> str:
        try:
            return " ".join(str(converter.to_cardinal(number)).split())
        except (NotImplementedError, OverflowError) as error:
            raise ValueError(
                f"got language {language!r}, in which num2words cannot say {number} ({error}), expected one that goes "
                f"to {LARGEST}; choose another"
            ) from error

    return say
