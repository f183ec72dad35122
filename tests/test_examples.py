"""The examples: simulations and the notebook run; what needs images or a cluster is read, and names what exists."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from matplotlib import pyplot as plt

from tests.snippets import names_of
from tools import notebook

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


def example(name: str) -> dict[str, Any]:
    return names_of((EXAMPLES / name).read_text())


def test_urgent_requests_wait_less() -> None:
    stock, ours = example("two_classes.py")["compare"]().values()
    assert ours["urgent, first token, mean s"] < stock["urgent, first token, mean s"]


def test_a_rollout_that_swaps_recomputes_nothing() -> None:
    stock, swapped, _ = example("rl_rollout.py")["compare"]().values()
    assert stock["recomputed tokens"] > 0 == swapped["recomputed tokens"]


def test_the_notebook_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    stored = json.loads((EXAMPLES / "train_judge_plot.ipynb").read_text())
    again, names = notebook.run(stored)
    assert len(names["axes"].lines) == 2 and "learned" in names["judged"].text()
    text, text_again = (re.sub(r"digest \w+", "", "".join(notebook.printed(one))) for one in (stored, again))
    assert text == text_again, "run `python tools/notebook.py examples/train_judge_plot.ipynb`"
    (picture,), (picture_again,) = notebook.pictures(stored), notebook.pictures(again)
    drawn, drawn_again = (plt.imread(io.BytesIO(png), format="png") for png in (picture, picture_again))
    assert abs(drawn.shape[0] - drawn_again.shape[0]) < 10 and len(picture) < MAX_PICTURE_BYTES
    if drawn.shape == drawn_again.shape:  # fonts differ between machines
        assert abs(drawn - drawn_again).mean() < MAX_DIFFERENCE, "another plot is stored"


MAX_PICTURE_BYTES = 1 << 17
MAX_DIFFERENCE = 0.02
"""Mean over all pixels, of 1: what other fonts, or other versions of matplotlib, may make."""


YAML = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.rglob("*.yaml"))


@pytest.mark.parametrize("file", YAML)
def test_what_is_deployed_is_read(file: str) -> None:
    assert all(isinstance(document, dict) for document in yaml.safe_load_all((EXAMPLES / file).read_text()))


def test_the_files_that_compose_mounts_exist() -> None:
    compose = yaml.safe_load((EXAMPLES / "compose" / "compose.yaml").read_text())
    services = compose["services"]
    mounted = [place.split(":")[0] for one in services.values() for place in one.get("volumes", ())]
    assert [place for place in mounted if place.startswith(".") and not (EXAMPLES / "compose" / place).is_file()] == []
    assert {place for place in mounted if not place.startswith(".")} == set(compose["volumes"])
    build = services["vllm"]["build"]
    assert (EXAMPLES / "compose" / build["context"] / build["dockerfile"]).is_file()


def compose_command(path: str) -> list[str] | None:
    """The tool on ``path`` that reads the file without a daemon: the standalone one, or docker where it has the plugin;
    None where there is neither."""
    if alone := shutil.which("docker-compose", path=path):
        return [alone]
    docker = shutil.which("docker", path=path)
    has_plugin = docker and not subprocess.run([docker, "compose", "version"], capture_output=True).returncode
    return [docker, "compose"] if docker and has_plugin else None


COMPOSE = compose_command(os.environ["PATH"])


def composed(folder: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    assert COMPOSE is not None
    command = [*COMPOSE, "-f", "compose.yaml", "config"]
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), **variables}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_a_docker_without_compose_is_no_compose(tmp_path: Path) -> None:
    docker = tmp_path / "docker"
    for status, found in ((125, None), (0, [str(docker), "compose"])):
        docker.write_text(f"#!/bin/sh\nexit {status}\n")
        docker.chmod(0o755)
        assert compose_command(str(tmp_path)) == found


@pytest.mark.skipif(COMPOSE is None, reason="neither docker-compose nor docker with its plugin is installed")
def test_compose_takes_its_file_and_asks_for_what_is_unset(tmp_path: Path) -> None:
    folder = EXAMPLES / "compose"
    done = composed(folder, MODEL="org/name", GRAFANA_PASSWORD="secret")
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert services.keys() == {"vllm", "prometheus", "grafana"} and services["vllm"]["command"][0] == "org/name"
    unset = composed(folder, MODEL="org/name")
    assert unset.returncode != 0 and "set a password for the user admin" in unset.stderr
    (tmp_path / "compose.yaml").write_text((folder / "compose.yaml").read_text().replace("depends_on", "depend_on"))
    assert composed(tmp_path, MODEL="org/name", GRAFANA_PASSWORD="secret").returncode != 0, (
        "what is misspelt is refused"
    )


def test_kubernetes_takes_its_file() -> None:
    """By the schemas of the newest version that the validator has, and strictly: no field that there is not."""
    validator = pytest.importorskip("kubernetes_validate")
    documents = list(yaml.safe_load_all((EXAMPLES / "kubernetes.yaml").read_text()))
    for document in documents:
        validator.validate(document, validator.latest_version(), strict=True)
    documents[0]["spec"]["replica"] = 1
    with pytest.raises(validator.utils.ValidationError, match="replica"):
        validator.validate(documents[0], validator.latest_version(), strict=True)


HADOLINT = shutil.which("hadolint", path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))


@pytest.mark.skipif(HADOLINT is None, reason="hadolint is not installed")
def test_the_dockerfile_has_no_lint(tmp_path: Path) -> None:
    assert HADOLINT is not None
    done = subprocess.run([HADOLINT, str(EXAMPLES / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode == 0 and not done.stdout, done.stdout
    (tmp_path / "Dockerfile").write_text("FROM vllm/vllm-openai\n")
    done = subprocess.run([HADOLINT, str(tmp_path / "Dockerfile")], capture_output=True, text=True)
    assert done.returncode != 0 and "DL3006" in done.stdout, "an image without a version is told"


def test_what_the_image_copies_is_enough_to_build(tmp_path: Path) -> None:
    text = (EXAMPLES / "Dockerfile").read_text()
    for *sources, target in (line.split()[1:] for line in text.splitlines() if line.startswith("COPY ")):
        place = tmp_path / Path(target).relative_to("/tmp")
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                file = place / Path(source).name if target.endswith("/") else place
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / source, file)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist")]
    done = subprocess.run([*command, str(tmp_path / "kvpolicy")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (version,) = re.findall(r"^FROM vllm/vllm-openai:v(\d+\.\d+)", text, re.MULTILINE)
    assert f" {version} " in (ROOT / "docs" / "features.md").read_text()
