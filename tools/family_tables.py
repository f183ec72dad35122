"""Write the tables of docs/model-families.md from their raw numbers: `python tools/family_tables.py`.

docs/family-survival.json is what `benchmarks/family_survival.py` writes with `--json`. A table stands behind
`<!-- survival: TOKENS ... -->`, mean tokens of output, and is redrawn as a whole.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE, SURVIVAL = ROOT / "docs" / "model-families.md", ROOT / "docs" / "family-survival.json"
COMMENT = "<!-- survival:"
TABLE = re.compile(rf"{COMMENT} (?P<outputs>[\d ]+) -->\n\n(?:\|.*\n)*")
MODELS = {
    "llama-3.1-8b": "Llama 3.1 8B, full attention",
    "mistral-7b-v0.1": "Mistral 7B v0.1, window of 4,096 alone",
    "gpt-oss-20b": "gpt-oss 20B, window of 128",
    "gemma-3-12b": "Gemma 3 12B, window of 1,024",
    "gemma-4-31b": "Gemma 4 31B, window of 1,024, blocks of 16 and 32",
    "llama-4-scout": "Llama 4 Scout, chunks of 8,192",
    "granite-4-h-small": "Granite 4 H Small, states, blocks of 528",
    "nemotron-h-8b": "Nemotron-H 8B, states, blocks of 528",
    "qwen3-next-80b-a3b": "Qwen3-Next 80B-A3B, states, blocks of 544",
    "deepseek-v3": "DeepSeek V3, latent KV",
}
"""By the names of `benchmarks/family_survival.py`, in the order of the page."""
UNLIMITED = ("llama-3.1-8b", "deepseek-v3")
"""Of which nobody goes past a window, a chunk or a block of states."""
SETTINGS = {"default": "default", "retention None": "retention `None`", "hybrid manager off": "hybrid manager off"}
Row = Mapping[str, Any]


def drawn(page: str, rows: Sequence[Row]) -> str:
    """The page with its tables of survival anew. Raises SystemExit for a comment without tokens or without an empty
    line behind it, and for one whose outputs were not measured."""
    if len(TABLE.findall(page)) != page.count(COMMENT):
        raise SystemExit(f"{PAGE.name}: every `{COMMENT} ... -->` should name tokens and have an empty line behind it")
    return TABLE.sub(lambda found: table(found["outputs"], rows), page)


def table(outputs: str, rows: Sequence[Row]) -> str:
    tokens = [int(one) for one in outputs.split()]
    lines = [heads(tokens), *survival_rows(tokens, rows)]
    if len(lines) == 1:
        raise SystemExit(f"{PAGE.name}: {SURVIVAL.name} has no rows with outputs of {outputs}")
    lines.insert(1, ["--"] * len(lines[0]))
    return f"{COMMENT} {outputs} -->\n\n" + "".join(f"| {' | '.join(line)} |\n" for line in lines)


def heads(tokens: Sequence[int]) -> list[str]:
    measured = [head for count in tokens for head in (f"survival, outputs of {count:,}", "tax")]
    if len(tokens) == 1:
        return ["model", "setting", *measured, "of those that had gone far", "of which found anything"]
    return ["model", "setting", *measured, "of those that had generated more than a window"]


def survival_rows(tokens: Sequence[int], rows: Sequence[Row]) -> Iterator[list[str]]:
    """A row for each model and setting that was measured with all these outputs. Of those that went far: with the
    longest ones, and how many of them found anything only where there is one column of outputs."""
    found = {(row["model"], row["setting"], row["output_tokens"]): row for row in rows}
    for model, title in MODELS.items():
        for setting, words in SETTINGS.items():
            of = [found[key] for count in tokens if (key := (model, setting, count)) in found]
            if len(of) < len(tokens):
                continue
            cells = [cell for row in of for cell in (share(row["survival"], row["preemptions"]), f"{row['tax']:.2f}")]
            hits = [str(of[-1]["far_with_hits"]) if of[-1]["far"] and model not in UNLIMITED else ""]
            yield [title, words, *cells, far(of[-1], model), *(hits if len(tokens) == 1 else [])]
            title = ""


def far(row: Row, model: str) -> str:
    if model in UNLIMITED:
        return ""
    return share(row["far_survival"], row["far"]) if row["far"] else "none"


def share(value: float, count: int) -> str:
    return f"{100 * value:.0f}% ({count})"


def main() -> None:
    argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0]).parse_args()
    PAGE.write_text(drawn(PAGE.read_text(), json.loads(SURVIVAL.read_text())))


if __name__ == "__main__":
    main()
