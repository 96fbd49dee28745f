"""Which files are read, by which set and which rank; and text that is none."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from train.tasks.language_model.text_folder import TextFolder, beginning, read, share_of


def write(folder: Path, **texts: str) -> str:
    for name, text in texts.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(folder)


def names(files: tuple[object, ...]) -> set[str]:
    return {file.name for file in files}  # type: ignore[attr-defined]


def test_the_hash_of_its_name_decides_for_each_file_whatever_else_is_there(tmp_path: Path) -> None:
    texts = {f"d{i}__a{i}_txt": "text\n" for i in range(40)}
    folder = TextFolder.find(write(tmp_path, **texts), validation_share=0.25)
    expected = {
        f"d{i}/a{i}.txt"
        for i in range(40)
        if int(hashlib.sha256(f"d{i}/a{i}.txt".encode()).hexdigest()[-8:], 16) < 0.25 * 16**8
    }
    assert names(folder.validation) == expected
    assert names(folder.train) | expected == {f"d{i}/a{i}.txt" for i in range(40)}
    assert 3 < len(expected) < 20
    assert folder.train != tuple(sorted(folder.train, key=lambda file: file.name)), "not by name"
    for file in folder.train[:5]:
        file.path.unlink()
    fewer = TextFolder.find(str(tmp_path), validation_share=0.25)
    assert fewer.validation == folder.validation
    assert fewer.digest != folder.digest


def test_names_say_which_set_where_they_name_both(tmp_path: Path) -> None:
    write(tmp_path, wiki_train_tokens="a\n", wiki_valid_tokens="b\n", wiki_test_tokens="c\n", more__train_txt="d\n")
    folder = TextFolder.find(str(tmp_path), validation_share=0.5)
    assert (names(folder.train), names(folder.validation)) == ({"wiki.train.tokens"}, {"wiki.valid.tokens"})


def test_patterns_choose_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    write(tmp_path, train_md="a\n", val_md="b\n", train_txt="c\n", _git__train_md="d\n")
    assert (tmp_path / ".git" / "train.md").is_file()
    folder = TextFolder.find(str(tmp_path), patterns=["*.md"], validation_share=0.5)
    assert names(folder.train) == {"train.md"}


def test_the_standard_library_is_there_without_files_that_some_systems_lack() -> None:
    folder = TextFolder.find("", validation_share=0.05)
    found = names(folder.train) | names(folder.validation)
    assert {"argparse.py", "json/decoder.py"} <= found
    assert not [name for name in found if name.startswith(("test/", "site-packages/", "tkinter/", "_sysconfigdata"))]
    assert len(folder.train) > 10 * len(folder.validation) > 0


@pytest.mark.parametrize("num_ranks", [1, 3, 7])
def test_shares_are_even_and_every_line_is_in_one(tmp_path: Path, num_ranks: int) -> None:
    lines = [f"{i} {'ä' * (i % 13)}\n" for i in range(300)]
    write(tmp_path, train_a="".join(lines[:10]), train_b="".join(lines[10:]), train_c="", valid_a="v")
    files = TextFolder.find(str(tmp_path), validation_share=0.5).train
    shares = [["".join(read(passage)) for passage in share_of(files, rank, num_ranks)] for rank in range(num_ranks)]
    sizes = [sum(len(text.encode()) for text in share) for share in shares]
    assert max(sizes) - min(sizes) <= 2 * max(len(line.encode()) for line in lines)
    assert sorted("".join(text for share in shares for text in share).split()) == sorted("".join(lines).split())


def test_the_beginning_ends_with_a_line(tmp_path: Path) -> None:
    write(tmp_path, train_a="one\ntwo\nthree\n", valid_a="v")
    files = TextFolder.find(str(tmp_path), validation_share=0.5).train
    assert ["".join(read(passage)) for passage in beginning(files, 5)] == ["one\ntwo\n"]
    assert ["".join(read(passage)) for passage in beginning(files, 0)] == ["one\ntwo\nthree\n"]


def test_long_files_are_read_in_pieces_that_end_with_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("train.tasks.language_model.text_folder.PIECE_BYTES", 8)
    text = "äöü\n" * 9 + "no end"
    write(tmp_path, train_a=text, valid_a="v")
    (passage,) = beginning(TextFolder.find(str(tmp_path), validation_share=0.5).train, 0)
    pieces = list(read(passage))
    assert "".join(pieces) == text
    assert len(pieces) > 3
    assert all(piece.endswith("\n") for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("texts", "patterns", "message"),
    [
        ({}, [], r"got no file in .*, expected text files; point --data-dir"),
        ({"a_txt": "text"}, ["*.md"], r"got no file \*\.md in .*, expected text files"),
        ({"train_txt": "", "valid_txt": "text"}, [], r"got 2 text files in .* no text among them for the train set"),
        ({"a_txt": "text"}, [], r"got 1 text files in .* no text among them for the \w+ set, expected some; call"),
    ],
)
def test_a_folder_without_text_is_refused(
    tmp_path: Path, texts: dict[str, str], patterns: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        TextFolder.find(write(tmp_path, **texts), patterns=patterns, validation_share=0.05)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"got '.*nowhere' \(no such folder\), expected text files"):
        TextFolder.find(str(tmp_path / "nowhere"), validation_share=0.05)


@pytest.mark.parametrize(("content", "byte", "place"), [(b"ab\n\xffc", "ff", 3), (b"PK\0\x03", "00", 2)])
def test_bytes_that_are_no_text_are_named_with_file_and_place(
    tmp_path: Path, content: bytes, byte: str, place: int
) -> None:
    write(tmp_path, valid_a="v")
    (tmp_path / "train.bin").write_bytes(content)
    (passage,) = beginning(TextFolder.find(str(tmp_path), validation_share=0.5).train, 0)
    expected = f"got byte 0x{byte} at {place} of {tmp_path / 'train.bin'}, expected UTF-8 text"
    with pytest.raises(ValueError, match=re.escape(expected)):
        list(read(passage))
