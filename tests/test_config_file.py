"""`kvpolicy config --into FILE`: a user's YAML keeps its comments and order, and is left alone where it contradicts."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from kvpolicy.errors import InputError
from kvpolicy_vllm import launch
from kvpolicy_vllm.config_file import merge
from tests.test_cli import run

EXTRA = {"policy": "always-swap", "host_gib": 2.0}
ADDITION = launch.config_yaml(EXTRA)
RECORDS = launch.config_yaml({"policy": "always-swap", "trace": "/var/trace"})
OURS = yaml.safe_load(ADDITION)
MINE = """\
# the chat server
model: some/llm   # 8B
port: 8001

compilation-config: {level: 3}
# keep this last
max-model-len: 4096
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text(MINE)
    return path


def test_comments_and_order_stay_and_the_difference_is_shown(file: Path) -> None:
    file.chmod(0o640)
    shown = merge(file, ADDITION)
    assert file.read_text() == MINE + ADDITION
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(MINE) | OURS
    assert "+scheduler-cls: kvpolicy_vllm.AdaptiveScheduler" in shown.splitlines()
    assert not [line for line in shown.splitlines()[2:] if line.startswith("-")]
    assert file.stat().st_mode & 0o777 == 0o640 and [*file.parent.iterdir()] == [file]


def test_twice_is_as_once(file: Path) -> None:
    merge(file, ADDITION)
    before, at = file.read_bytes(), file.stat().st_ino
    assert merge(file, ADDITION) == "" and file.read_bytes() == before and file.stat().st_ino == at


def test_another_policy_takes_the_place_of_the_one_before(file: Path) -> None:
    merge(file, ADDITION)
    file.write_text(file.read_text() + "# after it\nseed: 3\n")
    merge(file, launch.config_yaml({"policy": "always-recompute"}))
    text = file.read_text()
    assert text.startswith(MINE) and text.endswith("# after it\nseed: 3\n")
    assert yaml.safe_load(text)["kv-transfer-config"]["kv_connector_extra_config"] == {"policy": "always-recompute"}


def test_underscores_windows_lines_and_a_missing_last_newline(file: Path) -> None:
    file.write_bytes(b"port: 1\r\nscheduler_cls: kvpolicy_vllm.AdaptiveScheduler\r\nseed: 3")
    merge(file, ADDITION)
    text = file.read_bytes().decode()
    assert text.count("\r\n") == text.count("\n") and text.count("scheduler") == 1
    assert yaml.safe_load(text)["kv-transfer-config"] == OURS["kv-transfer-config"]


def test_a_shutdown_timeout_of_ones_own_stays(file: Path) -> None:
    file.write_text("shutdown_timeout: 60\n")
    merge(file, RECORDS)
    assert yaml.safe_load(file.read_text())["shutdown_timeout"] == 60
    assert "shutdown-timeout" not in file.read_text()


def test_a_file_that_is_not_there_is_made_and_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to(tmp_path / "new.yaml")
    merge(tmp_path / "link.yaml", ADDITION)
    assert (tmp_path / "link.yaml").is_symlink() and (tmp_path / "new.yaml").read_text() == ADDITION


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("scheduler-cls: somebody.Elses\n", "has scheduler-cls 'somebody.Elses', and kvpolicy needs"),
        (
            "kv-transfer-config: {kv_connector: NixlConnector, kv_role: kv_both}\n",
            "'NixlConnector'.*take it out.*MultiConnector",
        ),
        ("kv-transfer-config.kv_role: kv_both\n", "write kv-transfer-config as one entry"),
        ("kv_offloading_size: 4\n", "has kv_offloading_size, which excludes kvpolicy"),
        ("port: 1\nport: 2\n", "has port twice"),
        ("kv_transfer_config: 1\nkv-transfer-config: 2\n", "the same flag"),
        ("{port: 1}\n", "is no list of settings"),
        ("- port\n", "is no list of settings"),
        ("port: 1\n...\n", "cannot be edited"),
        ("port: [1\n", "cannot be read as YAML"),
    ],
)
def test_what_contradicts_or_cannot_be_edited_is_left_alone(file: Path, text: str, words: str) -> None:
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        merge(file, ADDITION)
    assert file.read_text() == text and [*file.parent.iterdir()] == [file]


def test_the_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("config", "--policy", "always-swap", "--host-gib", "2", "--into", str(file))
    assert run(*command) == 0
    assert "+kv-transfer-config:" in capsys.readouterr().out and file.read_text() == MINE + ADDITION
    assert run(*command) == 0
    assert capsys.readouterr().out == f"{file}: has these settings already\n"
    file.write_text("scheduler-cls: somebody.Elses\n")
    assert run(*command) != 0
    assert "somebody.Elses" in capsys.readouterr().err


@pytest.mark.parametrize(("order", "refused"), [("urgent", True), ("priority", False), ("fcfs", False)])
def test_two_that_rank_requests_are_refused(file: Path, order: str, refused: bool) -> None:
    file.write_text(MINE + "scheduling_policy: priority\n")
    addition = launch.config_yaml({"policy": "always-swap", "order": order})
    if not refused:
        assert merge(file, addition)
        return
    with pytest.raises(InputError, match="has scheduling_policy: priority, and --order urgent ranks requests itself"):
        merge(file, addition)
    assert file.read_text() == MINE + "scheduling_policy: priority\n"
