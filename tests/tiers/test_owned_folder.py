"""Folders that only one user reads and one process writes to."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from kvpolicy.errors import InputError
from kvpolicy.tiers import owned_folder
from kvpolicy.tiers.block_format import NO_PARENT, BlockName, digest_of_key
from kvpolicy.tiers.idle_folders import idle_folders
from kvpolicy.tiers.owned_folder import LOCK, MANIFEST, MAX_NAPS, WRITING, OwnedFolder, open_private, refuse_unsafe
from tests.tiers.blocks import NAMESPACE, descriptors

NAME = BlockName(digest_of_key(b"a"), NO_PARENT)


def claim(directory: Path, **more: str) -> OwnedFolder:
    return OwnedFolder.claim(directory, {**NAMESPACE, **more}, 100)


def put(folder: OwnedFolder, name: BlockName = NAME, size: int = 10) -> Path:
    path = folder.path / name.folder / name.file
    path.write_bytes(bytes(size))
    return path


def lose(folder: OwnedFolder) -> None:
    """As when its process is killed."""
    for locked in (folder._lock, folder.folder):
        os.close(locked)


def test_folders_and_their_files_are_private_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        claim(tmp_path / "new" / "kv").close()
    finally:
        os.umask(before)
    for path in (tmp_path / "new" / "kv", *(tmp_path / "new" / "kv").rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


def test_a_link_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "kv").symlink_to(tmp_path / "elsewhere")
    for refuse in (lambda path: claim(path), refuse_unsafe):
        with pytest.raises(InputError, match="is a link"):
            refuse(tmp_path / "kv")
    assert not any((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(mode)
    with pytest.raises(InputError, match=r"changed by other users .*chmod it to 700"):
        claim(tmp_path / "kv")


def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_folder.os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InputError, match=f"belongs to user {os.getuid()}"):
        refuse_unsafe(tmp_path / "kv")


def test_a_file_in_the_place_of_the_folder_is_an_error_of_the_system(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    with pytest.raises(NotADirectoryError):
        claim(tmp_path / "kv")


def test_links_inside_are_not_followed(tmp_path: Path) -> None:
    claim(tmp_path / "kv").close()
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    (victim / NAME.file).write_text("precious")
    digit = next((tmp_path / "kv").glob(f"*/0/{NAME.folder}"))
    digit.rmdir()
    digit.symlink_to(victim)
    with pytest.raises(InputError, match="is a link"):
        claim(tmp_path / "kv")
    assert (victim / NAME.file).read_text() == "precious"


def test_a_second_process_gets_a_folder_of_its_own_and_the_next_one_the_first(tmp_path: Path) -> None:
    first = claim(tmp_path)
    second, other = claim(tmp_path), claim(tmp_path, model="b")
    assert [folder.path.name for folder in (first, second, other)] == ["0", "1", "0"]
    assert first.path.parent == second.path.parent != other.path.parent
    first.close()
    third = claim(tmp_path)
    assert third.path == first.path
    for folder in (second, other, third):
        folder.close()


def test_the_folder_of_a_number_is_claimed_where_nobody_owns_it(tmp_path: Path) -> None:
    folders = [OwnedFolder.claim(tmp_path, NAMESPACE, 100, number) for number in (1, 1, 3, 0)]
    assert [folder.number for folder in folders] == [1, 0, 3, 2]
    for folder in folders:
        folder.close()


def test_only_so_many_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned_folder, "MAX_PROCESSES", 2)
    folders = [claim(tmp_path), claim(tmp_path)]
    with pytest.raises(InputError, match="2 processes"):
        claim(tmp_path)
    for folder in folders:
        folder.close()


def test_descriptors_are_closed(tmp_path: Path) -> None:
    before = descriptors()
    folders = [claim(tmp_path), claim(tmp_path)]
    put(folders[0])
    idle_folders(tmp_path, folders[0].path)
    for folder in folders:
        folder.close()
    idle_folders(tmp_path, tmp_path)[0].clear()
    assert descriptors() == before


@pytest.mark.parametrize("failing", [WRITING, "7", MANIFEST, "lock"])
def test_descriptors_are_closed_and_the_lock_is_free_where_a_folder_cannot_be_claimed(
    tmp_path: Path, failing: str
) -> None:
    claim(tmp_path).close()
    path = next(tmp_path.glob("*/0")) / failing
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()
        path.mkdir(mode=0o700)  # no manifest can take its place, and it is no lock
    if failing in (WRITING, "7"):
        path.write_text("no folder")
    before = descriptors()
    with pytest.raises(OSError):  # noqa: PT011  # each is another error of the system
        claim(tmp_path)
    assert descriptors() == before
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink()
    again = claim(tmp_path)
    assert again.path.name == "0"
    again.close()


def test_what_a_process_that_is_gone_was_writing_is_removed_and_that_of_a_living_one_is_not(tmp_path: Path) -> None:
    gone = claim(tmp_path)
    living = claim(tmp_path)
    left = [folder.path / WRITING / "7" for folder in (gone, living)]
    for path in left:
        path.write_text("half")
    lose(gone)
    again = claim(tmp_path)
    assert again.path == gone.path and not left[0].exists() and left[1].exists()
    living.close()
    assert not left[1].exists()


def test_a_lock_ends_with_its_process_however_that_ends(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from tests.tiers.test_owned_folder import claim\n"
        f"folder = claim(Path({str(tmp_path)!r})); print(folder.path.name, flush=True); time.sleep(600)"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "0\n"
    beside = claim(tmp_path)
    assert beside.path.name == "1"
    process.kill()
    process.wait()
    process.stdout.close()
    after = claim(tmp_path)
    assert after.path.name == "0"
    beside.close()
    after.close()


@pytest.mark.parametrize("damage", ["", "{", '{"version": 0}', "remove", "link"])
def test_blocks_without_a_manifest_that_vouches_for_them_are_removed(tmp_path: Path, damage: str) -> None:
    folder = claim(tmp_path)
    path, manifest = put(folder), folder.path / MANIFEST
    foreign = folder.path / NAME.folder / "notes.txt"
    foreign.write_text("")
    folder.close()
    claim(tmp_path).close()
    assert path.exists(), "a manifest that is right vouches for them"
    right = json.loads(manifest.read_text())
    manifest.unlink()
    if damage == "link":
        (tmp_path / "same").write_text(json.dumps(right))
        manifest.symlink_to(tmp_path / "same")
    elif damage != "remove":
        manifest.write_text(damage)
    claim(tmp_path).close()
    assert not path.exists() and foreign.exists()
    assert json.loads(manifest.read_text()) == right and not manifest.is_symlink()


def test_a_lock_file_that_is_removed_while_a_process_has_the_folder_gives_it_to_nobody(tmp_path: Path) -> None:
    """As by what cleans up old files."""
    first = claim(tmp_path)
    block = put(first)
    (first.path / MANIFEST).unlink()
    (first.path / LOCK).unlink()
    second = claim(tmp_path)
    assert second.number == 1 and block.exists() and idle_folders(tmp_path, second.path) == []
    first.close()
    (idle,) = idle_folders(tmp_path, second.path)
    assert idle.path == first.path
    third = claim(tmp_path)
    assert third.path == first.path and (third.path / LOCK).exists()
    for folder in (second, third):
        folder.close()


def test_an_earlier_version_that_locks_the_file_alone_owns_its_folder(tmp_path: Path) -> None:
    claim(tmp_path).close()
    lock = os.open(next(tmp_path.glob("*/0")) / LOCK, os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    second = claim(tmp_path)
    assert second.number == 1 and idle_folders(tmp_path, second.path) == []
    second.close()
    os.close(lock)


def test_where_folders_cannot_be_locked_the_file_alone_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def refuse(descriptor: int, how: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EBADF, "no locks of folders here")
        real(descriptor, how)

    monkeypatch.setattr(owned_folder.fcntl, "flock", refuse)
    first, second = claim(tmp_path), claim(tmp_path)
    put(first)
    assert [first.number, second.number] == [0, 1] and idle_folders(tmp_path, second.path) == []
    first.close()
    assert [folder.path for folder in idle_folders(tmp_path, second.path)] == [first.path]
    third = claim(tmp_path)
    assert third.number == 0
    for folder in (second, third):
        folder.close()


@pytest.mark.parametrize("name", [LOCK, ""], ids=["lock", "folder"])
def test_what_is_replaced_while_it_is_locked_is_opened_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """A lock on what has no name any more would keep nobody out."""
    claim(tmp_path).close()
    path, moves, before = next(tmp_path.glob("*/0")), [True], descriptors()
    real = owned_folder._takes_over

    def moved_meanwhile(lock: int) -> bool:
        if moves and os.path.samestat(os.fstat(lock), (path / name).stat()):
            moves.clear()
            (path / name).rename(tmp_path / "moved")
        return real(lock)

    monkeypatch.setattr(owned_folder, "_takes_over", moved_meanwhile)
    first, second = claim(tmp_path), claim(tmp_path)
    assert not moves and [first.number, second.number] == [0, 1]
    assert os.path.samestat(os.fstat(first._lock), (path / LOCK).stat())
    for folder in (first, second):
        folder.close()
    assert descriptors() == before


def test_a_process_that_was_forked_meanwhile_keeps_no_lock(tmp_path: Path) -> None:
    """It has the same open files as long as it starts no other program."""
    first = claim(tmp_path)
    forked = [os.dup(locked) for locked in (first._lock, first.folder)]
    first.close()
    second = claim(tmp_path)
    assert second.path == first.path
    second.close()
    for descriptor in forked:
        os.close(descriptor)


def test_a_second_close_does_nothing(tmp_path: Path) -> None:
    folder = claim(tmp_path)
    numbers = [folder._lock, folder.folder, folder.writing, *folder.by_digit.values()]
    folder.close()
    others = [os.open(tmp_path, os.O_RDONLY) for _ in numbers]
    assert {*numbers} & {*others}
    folder.close()
    assert all(stat.S_ISDIR(os.fstat(other).st_mode) for other in others)
    for other in others:
        os.close(other)


def shared(path: Path) -> int:
    """Its lock, as one who counts or clears it has it."""
    lock = os.open(path / "lock", os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_SH)
    return lock


def test_a_claim_waits_for_who_only_looks_and_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claim(tmp_path).close()
    path, naps = next(tmp_path.glob("*/0")), list[float]()
    lock = shared(path)

    def nap(seconds: float) -> None:
        naps.append(seconds)
        if len(naps) == 3:
            os.close(lock)

    monkeypatch.setattr(owned_folder.time, "sleep", nap)
    first = claim(tmp_path)
    assert first.path == path and len(naps) == 3
    second = claim(tmp_path)
    assert second.path.name == "1" and len(naps) == 3, "a living process is not waited for"
    second.close()
    first.close()
    lock = shared(path)
    naps += [0.0] * 3
    patient = claim(tmp_path)
    assert patient.path.name == "1" and len(naps) == 6 + MAX_NAPS, "nor is anybody for ever"
    patient.close()
    os.close(lock)


def test_a_folder_is_opened_once_for_all(tmp_path: Path) -> None:
    """A folder that is renamed, with another one in its place, is not written to."""
    folder = claim(tmp_path / "kv")
    (tmp_path / "kv").rename(tmp_path / "moved")
    opened = os.open("x", os.O_CREAT | os.O_WRONLY, 0o600, dir_fd=folder.writing)
    os.close(opened)
    assert list(tmp_path.glob("moved/*/0/writing/x")) and not (tmp_path / "kv").exists()
    folder.close()


def test_a_folder_in_a_folder_is_opened_relative_to_it(tmp_path: Path) -> None:
    outer = open_private(tmp_path / "outer")
    inner = open_private("inner", outer)
    assert os.fstat(inner).st_ino == (tmp_path / "outer" / "inner").stat().st_ino
    os.close(inner)
    os.close(outer)
