"""Folders of blocks that no process owns: found, counted and cleared, and left to whoever claims them meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from kvpolicy.tiers import idle_folders as module
from kvpolicy.tiers.block_format import FOLDERS, NO_PARENT, BlockName
from kvpolicy.tiers.idle_folders import ASK_AGAIN_S, CLAIMED_S, LOOK_AGAIN_S, IdleFolders, idle_folders
from kvpolicy.tiers.owned_folder import LOCK, WRITING, OwnedFolder
from tests.tiers.test_owned_folder import NAME, claim, lose, put


def test_unused_folders_are_found_with_their_bytes_the_one_used_longest_ago_first(tmp_path: Path) -> None:
    used = claim(tmp_path)
    for number, model in enumerate("bcd"):
        folder = claim(tmp_path, model=model)
        put(folder, size=10 + number)
        (folder.path / NAME.folder / "notes.txt").write_text("not counted")
        folder.close()
        os.utime(folder.path / "lock", (100 - number, 100 - number))
    idle = idle_folders(tmp_path, used.path)
    assert [(folder.used_bytes, folder.used_s) for folder in idle] == [(12, 98), (11, 99), (10, 100)]
    living = claim(tmp_path, model="d")
    assert not idle[0].clear() and (living.path / NAME.folder / NAME.file).exists()
    assert idle[1].clear() and not (idle[1].path / NAME.folder / NAME.file).exists()
    assert (idle[1].path / NAME.folder / "notes.txt").exists()
    assert [folder.used_bytes for folder in idle_folders(tmp_path, used.path)] == [10], "what was cleared is left out"
    living.close()
    used.close()


def test_a_folder_that_others_count_is_claimed_meanwhile_under_its_own_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where one rank looks for unused folders while another one claims its own. The latter's is not unused then."""
    used, model_of = claim(tmp_path), dict[Path, str]()
    for model in "bc":
        gone = claim(tmp_path, model=model)
        put(gone)
        model_of[gone.path] = model
        gone.close()
    claimed: list[OwnedFolder] = []
    count = module._used_bytes

    def counted(path: Path) -> int:
        if not claimed:
            claimed.append(claim(tmp_path, model=model_of[path]))
            assert claimed[0].path == path
        return count(path)

    monkeypatch.setattr(module, "_used_bytes", counted)
    idle = idle_folders(tmp_path, used.path)
    assert [folder.path for folder in idle] == [path for path in model_of if path != claimed[0].path]
    for folder in (used, *claimed):
        folder.close()


def test_what_was_being_written_counts_and_is_cleared_too(tmp_path: Path) -> None:
    """As in the folder of a model that was killed, and that nobody serves again."""
    used, gone = claim(tmp_path), claim(tmp_path, model="b")
    put(gone, size=10)
    half = gone.path / WRITING / "7"
    half.write_bytes(bytes(5))
    lose(gone)
    (idle,) = idle_folders(tmp_path, used.path)
    assert idle.used_bytes == 15
    assert idle.clear() and not half.exists() and idle.left_bytes() == 0
    used.close()


def test_what_cannot_be_removed_is_an_error_once_all_else_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used, gone = claim(tmp_path), claim(tmp_path, model="b")
    names = [BlockName(bytes.fromhex(digit * 40), NO_PARENT) for digit in FOLDERS]
    for name in names:
        put(gone, name)
    gone.close()
    (idle,) = idle_folders(tmp_path, used.path)
    real = os.unlink

    def unlink(file: str, **where: int) -> None:
        if file == names[7].file:
            raise PermissionError(1, "immutable")
        real(file, **where)

    with monkeypatch.context() as patch:
        patch.setattr(module.os, "unlink", unlink)
        with pytest.raises(PermissionError):
            idle.clear()
    assert idle.left_bytes() == 10 and not idle.is_owned()
    used.close()


def test_a_folder_whose_lock_file_was_removed_counts_and_is_cleared(tmp_path: Path) -> None:
    used, gone = claim(tmp_path), claim(tmp_path, model="b")
    block = put(gone)
    gone.close()
    (gone.path / LOCK).unlink()
    (idle,) = idle_folders(tmp_path, used.path)
    assert idle.used_bytes == 10 and not idle.is_owned() and idle.used_s == gone.path.stat().st_mtime
    owner = claim(tmp_path, model="b")
    assert idle.is_owned() and not idle.clear() and block.exists()
    owner.close()
    assert idle.clear() and not block.exists()
    used.close()


def test_links_are_neither_counted_nor_cleared(tmp_path: Path) -> None:
    """Whichever part of the path is one, from the beginning or by the time when it is cleared."""
    used, gone, elsewhere = claim(tmp_path / "kv"), claim(tmp_path / "kv", model="b"), claim(tmp_path / "elsewhere")
    block = put(elsewhere)
    put(gone)
    for folder in (gone, elsewhere):
        folder.close()
    (tmp_path / "kv" / ("a" * 40)).symlink_to(elsewhere.path.parent)
    (tmp_path / "kv" / ("b" * 40)).mkdir()
    (tmp_path / "kv" / ("b" * 40) / "0").symlink_to(elsewhere.path)
    (idle,) = idle_folders(tmp_path / "kv", used.path)
    assert idle.path == gone.path
    gone.path.parent.rename(tmp_path / "moved")
    gone.path.parent.symlink_to(elsewhere.path.parent)
    with pytest.raises(OSError):  # noqa: PT011  # another one on other systems
        idle.clear()
    assert block.exists()
    used.close()


def test_who_counts_a_folder_leaves_no_lock_to_a_process_that_was_forked_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else who claims it waits, and takes another one."""
    used, gone = claim(tmp_path), claim(tmp_path, model="b")
    put(gone)
    gone.close()
    forked, real = list[int](), module.try_flock

    def forks(lock: int, how: int) -> bool:
        forked.append(os.dup(lock))
        return real(lock, how)

    with monkeypatch.context() as patch:
        patch.setattr(module, "try_flock", forks)
        assert len(idle_folders(tmp_path, used.path)) == 1 and forked
    again = claim(tmp_path, model="b")
    assert again.path == gone.path
    for folder in (used, again):
        folder.close()
    for descriptor in forked:
        os.close(descriptor)


def test_what_is_no_folder_of_blocks_is_left_alone(tmp_path: Path) -> None:
    used = claim(tmp_path)
    (tmp_path / ("a" * 40)).mkdir()
    (tmp_path / ("a" * 40) / "0").write_text("")
    (tmp_path / ("a" * 40) / "1").mkdir()
    (tmp_path / "notes").mkdir()
    assert idle_folders(tmp_path, used.path) == []
    used.close()


def found_at(now_s: float, directory: Path, used: OwnedFolder) -> IdleFolders:
    """Those that the owner of a folder finds as it opens a tier then."""
    look = partial(idle_folders, directory, used.path)
    return IdleFolders(look(), now_s, look)


def test_folders_without_files_are_left_out_and_stay_for_who_claims_them(tmp_path: Path) -> None:
    used, gone, notes = claim(tmp_path), claim(tmp_path, model="b"), claim(tmp_path, model="c")
    (notes.path / NAME.folder / "notes.txt").write_text("no block, which is not cleared")
    for folder in (gone, notes):
        folder.close()
    idle = found_at(100.0, tmp_path, used)
    assert not idle.any and not idle.may_be_claimed(100.0) and idle.next_task(100.0 + CLAIMED_S) is None
    again = claim(tmp_path, model="b")
    assert again.path == gone.path
    for folder in (used, again):
        folder.close()


def attempt(action: Callable[[], None]) -> str:
    """As a tier tries something: why it failed, empty where it did not."""
    try:
        action()
    except OSError as error:
        return str(error)
    return ""


def test_folders_make_room_once_those_that_start_as_well_had_time_to_claim_theirs(tmp_path: Path) -> None:
    used = claim(tmp_path)
    for number, model in enumerate("bcd"):
        folder = claim(tmp_path, model=model)
        put(folder)
        folder.close()
        os.utime(folder.path / "lock", (number, number))
    idle = found_at(100.0, tmp_path, used)
    assert idle.any and idle.used_bytes == 30
    assert idle.may_be_claimed(100.0) and not idle.may_be_claimed(100.0 + CLAIMED_S)
    claimed = claim(tmp_path, model="c")
    look = idle.next_task(100.0)
    assert look is not None and idle.next_task(100.0) is None, "one after the other"
    look(attempt)
    assert idle.settle(100.0) == 0 and idle.used_bytes == 20, "claimed, not cleared"
    assert idle.next_task(100.0 + ASK_AGAIN_S / 2) is None
    again = idle.next_task(100.0 + ASK_AGAIN_S)
    assert again is not None
    again(attempt)
    assert idle.settle(100.0) == 0 and idle.used_bytes == 20
    for left in (10, 0):
        clear = idle.next_task(100.0 + CLAIMED_S)
        assert clear is not None
        clear(attempt)
        assert idle.settle(100.0) == 1 and idle.used_bytes == left
    assert not idle.any and idle.next_task(100.0 + CLAIMED_S) is None
    assert (claimed.path / NAME.folder / NAME.file).exists()
    for folder in (used, claimed):
        folder.close()


def left(directory: Path, model: str, time_s: float) -> OwnedFolder:
    """A folder with a block that was left then."""
    folder = claim(directory, model=model)
    put(folder)
    folder.close()
    os.utime(folder.path / "lock", (time_s, time_s))
    return folder


def test_folders_that_processes_leave_later_are_found_and_have_their_five_minutes(tmp_path: Path) -> None:
    """Anew where somebody has owned one in between."""
    used, served = claim(tmp_path), claim(tmp_path, model="b")
    idle, now_s = found_at(100.0, tmp_path, used), 100.0 + LOOK_AGAIN_S
    served.close()
    left(tmp_path, "b", 1)
    assert not idle.any and idle.next_look(now_s - 1, full=False) is None
    for time_s in (1, 2):
        left(tmp_path, "b", time_s)
        look = idle.next_look(now_s, full=False)
        assert look is not None and idle.next_look(now_s + LOOK_AGAIN_S, full=True) is None, "one after the other"
        look(attempt)
        assert idle.settle(now_s + 50) == 0 and idle.used_bytes == 10
        assert idle.next_look(now_s + LOOK_AGAIN_S - 1, full=False) is None
        assert idle.may_be_claimed(now_s + 49 + CLAIMED_S) and not idle.may_be_claimed(now_s + 50 + CLAIMED_S)
        now_s += LOOK_AGAIN_S
    look = idle.next_look(now_s, full=False)
    assert look is not None
    look(attempt)
    assert idle.settle(now_s) == 0 and not idle.may_be_claimed(now_s - LOOK_AGAIN_S + 50 + CLAIMED_S), "known already"
    again = claim(tmp_path, model="b")
    look = idle.next_look(now_s + LOOK_AGAIN_S, full=False)
    assert look is not None
    look(attempt)
    assert idle.settle(now_s) == 0 and not idle.any and idle.used_bytes == 0, "claimed"
    for folder in (used, again):
        folder.close()


def test_a_full_disk_is_looked_at_before_the_time_once(tmp_path: Path) -> None:
    used = claim(tmp_path)
    idle = found_at(0.0, tmp_path, used)
    left(tmp_path, "b", 1)
    looked = []
    for now_s in (1.0, 2.0, LOOK_AGAIN_S, LOOK_AGAIN_S + 1, LOOK_AGAIN_S + 2):
        look = idle.next_look(now_s, full=True)
        looked.append(look is not None)
        if look is not None:
            look(attempt)
        idle.settle(now_s)
    assert looked == [True, False, True, True, False] and idle.used_bytes == 10
    used.close()


def test_what_is_cleared_while_it_is_looked_for_others_counts_no_more(tmp_path: Path) -> None:
    used = claim(tmp_path)
    left(tmp_path, "b", 1)
    idle = found_at(0.0, tmp_path, used)
    look, clear = idle.next_look(CLAIMED_S, full=False), idle.next_task(CLAIMED_S)
    assert look is not None and clear is not None
    look(attempt)
    clear(attempt)
    assert idle.settle(CLAIMED_S) == 1 and not idle.any and idle.used_bytes == 0
    used.close()


def test_what_cannot_be_cleared_is_counted_once_however_often_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And as long as it is there; nor is anything forgotten where looking fails."""
    used, gone = claim(tmp_path), left(tmp_path, "b", 1)
    idle = found_at(0.0, tmp_path, used)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "made up")

    clear = idle.next_task(CLAIMED_S)
    assert clear is not None
    with monkeypatch.context() as patch:
        patch.setattr(module.os, "unlink", refuse)
        clear(attempt)
    assert idle.settle(CLAIMED_S) == 0 and not idle.any and idle.used_bytes == 10
    for number, (fails, left_bytes) in enumerate([(True, 10), (False, 10), (False, 0)], 1):
        if not left_bytes:
            (gone.path / NAME.folder / NAME.file).unlink()
        look = idle.next_look(CLAIMED_S + number * LOOK_AGAIN_S, full=False)
        assert look is not None
        with monkeypatch.context() as patch:
            if fails:
                patch.setattr(idle, "_look", refuse)
            look(attempt)
        assert idle.settle(CLAIMED_S + number * LOOK_AGAIN_S) == 0 and not idle.any and idle.used_bytes == left_bytes
    used.close()
