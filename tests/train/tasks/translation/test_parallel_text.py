"""Parallel text: files that are as they should be, files that are not, and number words."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from train.tasks.translation.config import TranslationConfig
from train.tasks.translation.corpus import CorpusFolder
from train.tasks.translation.number_words import LARGEST, NUM_HELD_OUT, number_words
from train.tasks.translation.parallel_text import Pair, TextFiles
from train.tasks.translation.task import corpus_of


def write(path: Path, *lines: str) -> Path:
    data = "".join(f"{line}\n" for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def test_pairs_are_lines_plain_or_compressed(tmp_path: Path) -> None:
    english = write(tmp_path / "a.en", "two  birds", "", "a\u2028cat", "blank here", "the end")
    german = write(tmp_path / "a.de.gz", "zwei Vögel", "nichts", "eine Katze\r", "  ", "das Ende")
    text = TextFiles(english, german)
    pairs = [Pair("two birds", "zwei Vögel"), Pair("a cat", "eine Katze"), Pair("the end", "das Ende")]
    assert list(text) == pairs
    assert list(text) == pairs, "each pass begins at the beginning"
    assert text.num_blank == 2


def test_subwords_of_another_program_are_undone(tmp_path: Path) -> None:
    english = write(tmp_path / "a.en", "the hou@@ se@@ s")
    german = write(tmp_path / "a.de", "die Hä@@ us@@ er")
    assert list(TextFiles(english, german, "@@ ")) == [Pair("the houses", "die Häuser")]


@pytest.mark.parametrize(("num_english", "num_german"), [(3, 5), (5, 3)])
def test_files_of_different_lengths_are_named_with_their_lines(
    tmp_path: Path, num_english: int, num_german: int
) -> None:
    english = write(tmp_path / "a.en", *["x"] * num_english)
    german = write(tmp_path / "a.de", *["y"] * num_german)
    with pytest.raises(ValueError, match=rf"got {num_english} lines in .*a\.en and {num_german} in .*a\.de, expected"):
        list(TextFiles(english, german))


def test_a_line_that_is_no_utf8_is_named(tmp_path: Path) -> None:
    english = write(tmp_path / "a.en", "one", "two", "three")
    german = tmp_path / "a.de"
    german.write_bytes("eins\nzwei\nfünf\n".encode("latin-1"))
    with pytest.raises(ValueError, match=r"got byte 0xfc in line 3 of .*a\.de, expected UTF-8; convert"):
        list(TextFiles(english, german))


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    english = write(tmp_path / "a.en", *["one"] * 5000)
    german = write(tmp_path / "a.de.gz", *[f"{number}" for number in range(5000)])
    whole = german.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"no archive", whole[:-8] + b"12345678"):
        german.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"got .*a\.de\.gz, damaged after line \d+ .*, expected a whole gzip file"):
            list(TextFiles(english, german))


def corpus_folder(folder: Path, *prefixes: str) -> TranslationConfig:
    for prefix in prefixes:
        write(folder / f"{prefix}.en.gz", f"{prefix} one")
        write(folder / f"{prefix}.de", f"{prefix} eins")
    return TranslationConfig(data_dir=str(folder))


@pytest.mark.parametrize("validation", ["val", "valid", "validation", "dev"])
def test_the_usual_names_are_found(tmp_path: Path, validation: str) -> None:
    corpus = corpus_of(corpus_folder(tmp_path, "train", validation, "test_2016_flickr"))
    found = [next(iter(text)).source for text in corpus]
    assert found == ["train one", f"{validation} one", "test_2016_flickr one"]


def test_the_names_of_moses_can_be_given(tmp_path: Path) -> None:
    names = ("train.tok.clean.bpe.32000", "newstest2013.tok.bpe.32000", "newstest2014.tok.bpe.32000")
    corpus_folder(tmp_path, *names, "newstest2015.tok.bpe.32000")
    config = TranslationConfig(
        data_dir=str(tmp_path), train_prefix=names[0], validation_prefix=names[1], test_prefix=names[2]
    )
    assert [next(iter(text)).source for text in corpus_of(config)] == [f"{name} one" for name in names]


def test_files_that_are_missing_or_in_doubt_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"got no such folder in .*nowhere, expected the train set train with \.en and"
    ):
        corpus_of(TranslationConfig(data_dir=str(tmp_path / "nowhere")))
    config = corpus_folder(tmp_path, "train", "test1")
    with pytest.raises(ValueError, match=r"got test1.de, .*, expected the validation set val or .*--validation-prefix"):
        corpus_of(config)
    corpus_folder(tmp_path, "dev", "test2")
    with pytest.raises(ValueError, match=r"got 2 test sets in .* \(test1, test2\), expected one; .*--test-prefix"):
        corpus_of(config)
    write(tmp_path / "lonely.en", "one")
    assert CorpusFolder(tmp_path, "en", "de").prefixes == ("dev", "test1", "test2", "train")


def test_number_words_are_right_and_held_out_ones_are_never_learnt() -> None:
    corpus = number_words("en", "de", num_train=200)
    sets = [set(text) for text in corpus]
    assert [len(pairs) for pairs in sets] == [200, NUM_HELD_OUT, NUM_HELD_OUT]
    assert len(set.union(*sets)) == sum(map(len, sets))
    fewer = number_words("en", "de", num_train=1)
    assert list(fewer.test) == list(corpus.test), "the test does not depend on what is learnt"
    translations = {pair.source: pair.target for pairs in sets for pair in pairs}
    assert translations["two hundred and forty thousand, nine hundred and twenty-one"] == (
        "zweihundertvierzigtausendneunhunderteinundzwanzig"
    )


def test_number_words_have_limits() -> None:
    with pytest.raises(
        ValueError, match=r"got language 'xx', expected one that num2words speaks \(.*de.*\); for other"
    ):
        number_words("en", "xx", num_train=1)
    with pytest.raises(ValueError, match=r"got num_numbers=0, expected 1 to \d+"):
        number_words("en", "de", num_train=0)
    with pytest.raises(ValueError, match=r"got num_numbers=\d+, expected 1 to \d+"):
        number_words("en", "de", num_train=LARGEST)
