"""Gather the raw numbers of published results, simulated, in docs/published-results.json.

    python tools/published_results.py NAME=FILE ...

FILE: what the script of that name wrote with `--json`. It replaces what docs/published-results.json has of the script;
numbers are kept to six digits.
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

from kvpolicy.json_values import rounded

RAW = Path(__file__).resolve().parent.parent / "docs" / "published-results.json"
SCRIPTS = (
    "published_watermark", "fidelity_e2e", "published_two_classes", "published_kv_waste", "published_overflow",
    "published_two_gpus", "published_sheets",
)  # fmt: skip
LEFT_OUT = ("over_time",)
"""What no page shows."""
FOLDERS = re.compile(r"(?<![^\s'\"])/(?:[^\s/]+/)+")
"""Of a file's absolute path all but its name: which folders a machine has is no result."""


def without_folders(value: Any) -> Any:
    if isinstance(value, str):
        return FOLDERS.sub("", value)
    if isinstance(value, dict):
        return {name: without_folders(one) for name, one in value.items()}
    return [*map(without_folders, value)] if isinstance(value, list) else value


def text_of(raw: dict[str, Any]) -> str:
    """The JSON, with a line for every row of a script's tables."""
    scripts = [f"{json.dumps(name)}: {_table(raw[name])}" for name in SCRIPTS if name in raw]
    return "{\n" + ",\n".join(scripts) + "\n}\n"


def _table(value: Any) -> str:
    if isinstance(value, dict):
        return "{\n" + ",\n".join(f"{json.dumps(name)}: {_table(one)}" for name, one in value.items()) + "}"
    if isinstance(value, list) and value:
        return "[\n" + ",\n".join(map(json.dumps, value)) + "]"
    return json.dumps(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", metavar="NAME=FILE", help=f"NAME: {', '.join(SCRIPTS)}")
    raw = json.loads(RAW.read_text()) if RAW.exists() else {}
    for given in parser.parse_args().files:
        name, _, file = given.partition("=")
        if name not in SCRIPTS:
            parser.error(f"{given}: should be NAME=FILE, with NAME one of {', '.join(SCRIPTS)}")
        try:
            raw[name] = without_folders(rounded(json.loads(Path(file).read_text()), left_out=LEFT_OUT))
        except (OSError, ValueError) as error:
            parser.error(f"{given}: cannot be read: {error}")
    RAW.write_text(text_of(raw))


if __name__ == "__main__":
    main()
