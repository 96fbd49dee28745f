"""Files of a folder: what they look like, and the errors of the operating system."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from gossip_modules.mailbox.errors import MailboxError, Unavailable
from gossip_modules.mailbox.medium import Medium, open_medium
from tests.library.mailbox.clock import InstantClock


def folder(path: Path) -> Medium:
    return open_medium(f"file://{path}", timeout=5.0, key=b"key of these tests", clock=InstantClock())


def fail(monkeypatch: pytest.MonkeyPatch, name: str, code: int, *, times: int = 1000, done: bool = False) -> list[Any]:
    """Have calls of a function of `os` fail, after it has done its work if `done`; the arguments of those calls."""
    real, calls = getattr(os, name), list[Any]()

    def failing(*arguments: Any) -> Any:
        if len(calls) >= times:
            return real(*arguments)
        calls.append(arguments)
        if done:
            real(*arguments)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, name, failing)
    return calls


def test_nothing_is_left_of_writes_and_deletes(tmp_path: Path) -> None:
    medium = folder(tmp_path / "run")
    medium.create("a/b/c", b"1")
    medium.create("a/b/c", b"2")
    medium.put("a/b/d", b"3")
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {"run/a/b/c", "run/a/b/d"}
    medium.delete(["a/b/c", "a/b/d"])
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".parts"]


def test_files_that_killed_processes_left_are_deleted_after_an_hour(tmp_path: Path) -> None:
    folder(tmp_path / "run").create("a", b"x")
    parts = tmp_path / "run" / ".parts"
    for name, age in (("old", 3700), ("young", 3500)):
        (parts / name).write_bytes(b"x")
        now = (parts / name).stat().st_mtime
        os.utime(parts / name, (now - age, now - age))
    assert set(folder(tmp_path / "run").list()) == {"a"}
    assert [path.name for path in parts.iterdir()] == ["young"]


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, r"No space left on device; make room \(df -h"),
        (errno.EDQUOT, "make room"),
        (errno.EROFS, "Read-only file system; let this user write there"),
        (errno.EACCES, "let this user write there"),
    ],
)
@pytest.mark.parametrize("call", ["create", "put"])
def test_refusals_of_the_system_have_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, remedy: str
) -> None:
    medium = folder(tmp_path / "run")
    calls = fail(monkeypatch, "fsync", code)
    with pytest.raises(MailboxError, match=rf"{call} 'a/b' in file://.*/run failed .* 1 try: .*{remedy}"):
        getattr(medium, call)("a/b", b"x")
    assert len(calls) == 1
    assert list((tmp_path / "run" / ".parts").iterdir()) == []


def test_a_full_file_system_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """/dev/full is always full: the kernel refuses the write."""
    medium = folder(tmp_path / "run")
    (tmp_path / "run" / ".parts" / "full").symlink_to("/dev/full")
    monkeypatch.setattr("uuid.UUID.hex", "full")
    with pytest.raises(MailboxError, match=r"No space left on device; make room"):
        medium.create("a", b"x")
    assert (medium.get("a", max_bytes=9), medium.list()) == (None, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_an_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(MailboxError, match=r"Permission denied.*; let this user write there"):
        folder(tmp_path / "run")
    tmp_path.chmod(0o700)


def test_a_file_system_without_links_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    medium = folder(tmp_path / "run")
    fail(monkeypatch, "link", errno.EOPNOTSUPP)
    with pytest.raises(MailboxError, match=r"create 'a' .*this file system has no hard links"):
        medium.create("a", b"x")


def test_a_file_in_the_place_of_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(MailboxError, match=r"open '' in file://.*/run failed .*Not a directory.*; a file is in"):
        folder(tmp_path / "run")
    medium = folder(tmp_path / "other")
    (tmp_path / "other" / "a").write_text("a file")
    with pytest.raises(MailboxError, match=r"create 'a/b' .*; a file is in the place of a folder"):
        medium.create("a/b", b"x")


def test_a_missing_parent_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(MailboxError, match=r"there is no folder '.*/typo'; mount or make it, or give another one"):
        folder(tmp_path / "typo" / "run")


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO, errno.ETIMEDOUT])
@pytest.mark.parametrize("name", ["fsync", "link", "replace", "unlink"])
@pytest.mark.parametrize("done", [False, True], ids=["before", "after"])
def test_passing_errors_are_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, code: int, done: bool
) -> None:
    """NFS loses answers of link, rename and unlink after they were carried out."""
    medium = folder(tmp_path / "run")
    calls = fail(monkeypatch, name, code, times=1, done=done)
    assert medium.create("a", b"mine")
    medium.put("b", b"beat")
    assert (medium.get("a", max_bytes=9), medium.get("b", max_bytes=9)) == (b"mine", b"beat")
    medium.delete(["a", "b"])
    assert medium.list() == {}
    assert (len(calls), medium.counts.retries) == (1, 1)


def test_a_link_whose_answer_says_that_it_exists_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The NFS client repeats a lost request by itself, and the answer to the second one is "exists"."""
    medium = folder(tmp_path / "run")
    fail(monkeypatch, "link", errno.EEXIST, done=True)
    assert medium.create("a", b"mine")
    assert medium.counts.retries == 0


def test_an_unmounted_folder_does_not_look_empty(tmp_path: Path) -> None:
    medium = folder(tmp_path / "run")
    medium.create("a", b"x")
    (tmp_path / "run").rename(tmp_path / "gone")
    for call in (lambda: medium.get("a", max_bytes=9), lambda: medium.list(), lambda: medium.create("a", b"y")):
        with pytest.raises(Unavailable, match=r"No such file or directory"):
            call()
    assert not (tmp_path / "run").exists()
