"""CorpusFolder: training, validation and test text, found by the usual names; or number words, without a file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from train.tasks.translation.number_words import number_words
from train.tasks.translation.parallel_text import Corpus, TextFiles

VALIDATION_PREFIXES = ("val", "valid", "validation", "dev")


def load_corpus(
    data_dir: str,
    *,
    source: str,
    target: str,
    num_numbers: int,
    joiner: str = "",
    train_prefix: str = "",
    validation_prefix: str = "",
    test_prefix: str = "",
) -> Corpus:
    """Load a corpus of files, or of number words if `data_dir` is empty.

    Args:
        data_dir: folder of the files.
        source, target: the source and the target language.
        num_numbers: the number of training sentences of number words.
        joiner: see `TextFiles`.
        train_prefix, validation_prefix, test_prefix: the beginnings of the names of files; empty: the usual ones.

    Raises:
        ValueError: files are missing, or several sets of files could be meant.
    """
    if not data_dir:
        return number_words(source, target, num_train=num_numbers)
    folder = CorpusFolder(Path(data_dir), source, target, joiner)
    return Corpus(
        folder.text(folder.choose("train", train_prefix, ("train",))),
        folder.text(folder.choose("validation", validation_prefix, VALIDATION_PREFIXES)),
        folder.text(folder.choose("test", test_prefix, tuple(p for p in folder.prefixes if p[:4] == "test"))),
    )


@dataclass(frozen=True)
class CorpusFolder:
    """A folder of files <prefix>.<language>, plain or .gz: train.en and train.de, or as Moses' scripts leave them.

    Args:
        folder: the folder of the files.
        source: the source language, the last part of a file's name.
        target: the target language.
        joiner: see `TextFiles`.
    """

    folder: Path
    source: str
    target: str
    joiner: str = ""

    @property
    def prefixes(self) -> tuple[str, ...]:
        """The prefixes with files in both languages; sorted."""
        found = [
            {path.name.removesuffix(".gz").removesuffix(f".{language}") for path in self._files(language)}
            for language in (self.source, self.target)
        ]
        return tuple(sorted(found[0] & found[1]))

    def choose(self, role: str, prefix: str, usual: tuple[str, ...]) -> str:
        """Return the prefix of the files for `role`.

        Args:
            role: train, validation or test.
            prefix: the prefix that the user gave; empty: any of the usual ones.
            usual: the usual prefixes for this role.

        Raises:
            ValueError: no prefix, or several, have files.
        """
        found = [name for name in self.prefixes if name in ((prefix,) if prefix else usual)]
        if len(found) == 1:
            return found[0]
        suffixes = f".{self.source} and .{self.target}, plain or .gz"
        if found:
            raise ValueError(
                f"got {len(found)} {role} sets in {self.folder} ({', '.join(found)}), expected one; say which with "
                f"--{role}-prefix"
            )
        expected = prefix or {"train": "train", "test": "test*"}.get(role, " or ".join(usual))
        raise ValueError(
            f"got {self._contents()} in {self.folder}, expected the {role} set {expected} with {suffixes}; point "
            f"--data-dir there, name it with --{role}-prefix, or choose other languages with --source and --target"
        )

    def text(self, prefix: str) -> TextFiles:
        """Return the two files of `prefix`."""
        source, target = (
            next(path for path in self._files(language) if path.name.removesuffix(".gz") == f"{prefix}.{language}")
            for language in (self.source, self.target)
        )
        return TextFiles(source, target, self.joiner)

    def _files(self, language: str) -> list[Path]:
        return sorted(path for end in (language, f"{language}.gz") for path in self.folder.glob(f"*.{end}"))

    def _contents(self) -> str:
        if not self.folder.is_dir():
            return "no such folder"
        names = sorted(path.name for path in self.folder.iterdir())
        more = f" and {len(names) - 8} more" if len(names) > 8 else ""
        return f"{', '.join(names[:8])}{more}" if names else "no file"
