"""Files and directories of a job: files planted by other users, links, and modes of existing files."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.host import private_files

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files to another user")


def mode(path: Path) -> int:
    return stat.S_IMODE(os.lstat(path).st_mode)


def write_by(opened: Callable[[Path], int], path: Path, data: bytes = b"new") -> None:
    private_files.write_all(opened(path), data)


def opened_for_writing(path: Path) -> int:
    return private_files.open_file(path, os.O_TRUNC)


WAYS = [private_files.create_file, opened_for_writing]


@pytest.mark.parametrize("opened", WAYS)
def test_a_file_has_mode_0600_whatever_was_there_and_whatever_the_umask(tmp_path: Path, opened) -> None:
    old = tmp_path / "old"
    old.write_text("a longer text of before")
    old.chmod(0o666)
    umask = os.umask(0)
    try:
        for path in (old, tmp_path / "new"):
            write_by(opened, path)
            assert (path.read_bytes(), mode(path)) == (b"new", 0o600)
    finally:
        os.umask(umask)


def test_who_has_an_old_file_open_reads_nothing_of_the_new_one(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("before")
    with old.open("rb") as listening:
        write_by(private_files.create_file, old)
        assert listening.read() == b"before"


@pytest.mark.parametrize("opened", WAYS)
def test_a_link_is_not_written_through(tmp_path: Path, opened) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    for name, make in {"symbolic": os.symlink, "hard": os.link}.items():
        make(target, tmp_path / name)
        with contextlib.suppress(OSError):
            write_by(opened, tmp_path / name)
        assert target.read_text() == "mine"


def test_what_is_no_regular_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match=r"No such device|no regular file"):
        private_files.open_file(tmp_path / "fifo")


@as_root
def test_a_file_of_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "theirs"
    path.write_text("theirs")
    os.chown(path, NOBODY, NOBODY)
    with pytest.raises(PermissionError, match=r"belongs to another user \(uid 65534; this process has 0\)"):
        private_files.open_file(path, os.O_TRUNC)
    assert path.read_text() == "theirs"


@as_root
@pytest.mark.parametrize("given", [0o700, 0o755, 0o777, 0o1777])
def test_a_directory_of_another_user_is_refused(tmp_path: Path, given: int) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(given)
    os.chown(theirs, NOBODY, NOBODY)
    for use in (private_files.make_directory, lambda path: private_files.create_file(path / "file")):
        with pytest.raises(PermissionError, match="belongs to another user"):
            use(theirs)
    assert list(theirs.iterdir()) == []


@pytest.mark.parametrize("given", [0o770, 0o707, 0o775, 0o777, 0o720])
def test_a_directory_to_which_others_write_is_refused(tmp_path: Path, given: int) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(given)
    for use in (private_files.make_directory, lambda path: private_files.create_file(path / "file")):
        with pytest.raises(PermissionError, match="run 'chmod go-w'"):
            use(shared)
    assert mode(shared) == given and list(shared.iterdir()) == []


def test_a_directory_has_mode_0700_but_for_one_like_tmp_or_with_other_files(tmp_path: Path) -> None:
    for name, given, keep_mode, expected in (
        ("absent/below", None, False, 0o700),
        ("open", 0o755, False, 0o700),
        ("kept", 0o755, True, 0o755),
        ("sticky", 0o1777, False, 0o1777),
    ):
        path = tmp_path / name
        if given is not None:
            path.mkdir()
            path.chmod(given)
        assert private_files.make_directory(path, keep_mode=keep_mode) == (given is None)
        assert mode(path) == expected, name
    assert mode(tmp_path / "absent") == 0o700


def test_a_link_to_a_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    (tmp_path / "link").symlink_to("target")
    for use in (private_files.make_directory, lambda path: private_files.create_file(path / "file")):
        with pytest.raises(OSError, match="symbolic link, which is not followed"):
            use(tmp_path / "link")
    assert list((tmp_path / "target").iterdir()) == []


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "record"
    private_files.replace(path, b"one")
    (tmp_path / "link").symlink_to(path)
    private_files.replace(tmp_path / "link", b"two")
    assert (path.read_bytes(), (tmp_path / "link").read_bytes()) == (b"one", b"two")
    assert not (tmp_path / "link").is_symlink() and len([*tmp_path.iterdir()]) == 2
    assert mode(path) == mode(tmp_path / "link") == 0o600
