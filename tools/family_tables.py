"""Write the figures of docs/model-families.md from their raw numbers: `python tools/family_tables.py [--live FILE]`.

docs/family-survival.json is what `benchmarks/family_survival.py` writes with `--json`. A table stands behind
`<!-- survival: TOKENS ... -->`, mean tokens of output, and is redrawn as a whole, and so is what stands between
`<!-- what survived -->` and `<!-- what survived: end -->`. All loads of the file count together.

docs/live-windows.json is what `benchmarks/live_windows.py` writes; FILE takes its place. What stands between
`<!-- live windows -->` and `<!-- live windows: end -->` is redrawn.

docs/exactness.json is what `python -m pytest -p tests.feature_record tests/vllm/test_families.py` writes. What stands
between `<!-- exactness -->` and `<!-- exactness: end -->` is redrawn from its rows of one version of vLLM.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from decimal import ROUND_UP, Context
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.survival_cells import DEFAULT, DENSE, WHOLE, Row, Share, far_survival, parsed, survival, tax
from kvpolicy.errors import InputError
from kvpolicy.stats import Ratio

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
WINDOWS = {"gpt-oss-20b": "gpt-oss", "gemma-3-12b": "Gemma 3", "gemma-4-31b": "Gemma 4"}
WITH_STATES = ("granite-4-h-small", "nemotron-h-8b", "qwen3-next-80b-a3b")
LONG = "mistral-7b-v0.1"
"""The one with the longest window, which alone serves outputs of LONGEST."""
FAR, LONGEST = 3000, 8000
"""Mean tokens of output for what the page says of victims that went far."""
SETTINGS = {DEFAULT: "default", DENSE: "retention `None`", WHOLE: "hybrid manager off"}
LIVE = ROOT / "docs" / "live-windows.json"
STOCK, RECOMPUTE, SWAP = "vllm", "always-recompute", "always-swap"
ARMS = {RECOMPUTE: "plugin, always recompute", SWAP: "plugin, always swap"}
FIGURES = {"tok/s": "tokens/s", "CPU time": "CPU time", "e2e": "mean end to end", "TTFT": "mean time to first token"}
GAINS = {"tok/s": "tokens/s", "e2e": "the mean end-to-end time"}
"""Figures of which the page says where a gain could not be told."""
EXACTNESS, EXACT_ON = ROOT / "docs" / "exactness.json", "0.32"
"""And the version of vLLM whose rows the page has."""
COMPARED = {
    "llama": "Llama, full attention alone",
    "llama, bfloat16": "the same",
    "gpt-oss": "gpt-oss",
    "gpt-oss, windows stored whole": "gpt-oss, windows stored whole",
    "gemma-3": "Gemma 3",
    "gemma-4": "Gemma 4, blocks of two sizes",
    "mistral": "Mistral, with a window",
    "llama-4": "Llama 4, chunks of 64",
    "llama-4, chunks stored whole": "Llama 4, chunks stored whole",
    "granite-4": "Granite 4",
    "nemotron-h": "Nemotron-H",
    "qwen3-next": "Qwen3-Next",
    "qwen3.5": "Qwen 3.5",
    "deepseek-v2": "DeepSeek V2",
    "deepseek-v3": "DeepSeek V3, experts in groups",
    "glm-4.7": "GLM-4.7-Flash (`Glm4MoeLite`)",
}
"""By the names of `tests/vllm/families.py`, in the order of the page."""
PLACES = ("at a block's end", "inside a block", "twice")
IN_PREFILL, RECOMPUTED = "in its prefill", "recomputed"
"""Names of cases of `tests/vllm/test_families.py`. Where prompts are computed whole there is none in a prefill."""
ROUNDED = "llama, bfloat16"
"""Of which more recomputes are compared than one."""
WIDTH = 120
Run = Mapping[str, Any]
Cells = Mapping[tuple[Any, ...], Sequence[Row]]
"""Rows of all loads, by model, setting and tokens of output."""


# ---- what survives ----


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


def refuse_partial(rows: Sequence[Row]) -> None:
    """Raise SystemExit for a model of which there is no row, as it would go from the page, and for a load that not all
    models and settings served with outputs of that length, as figures of different loads would stand side by side."""
    if missing := MODELS.keys() - {row.model for row in rows}:
        names = ", ".join(sorted(missing))
        raise SystemExit(f"{SURVIVAL.name}: should have rows of {names}, which family_survival.py --models makes")
    for (outputs, seed), have in by(rows, "output_tokens", "seed").items():
        wanted = {(row.model, row.setting) for row in rows if row.output_tokens == outputs}
        if lacking := wanted - {(row.model, row.setting) for row in have}:
            names = "; ".join(sorted(map(", ".join, lacking)))
            raise SystemExit(f"{SURVIVAL.name}: seed {seed} with outputs of {outputs} has no rows of {names}")


def by(rows: Iterable[Row], *names: str) -> dict[tuple[Any, ...], list[Row]]:
    found = defaultdict(list)
    for row in rows:
        found[tuple(getattr(row, name) for name in names)].append(row)
    return found


def heads(tokens: Sequence[int]) -> list[str]:
    measured = [head for count in tokens for head in (f"survival, outputs of {count:,}", "tax")]
    if len(tokens) == 1:
        return ["model", "setting", *measured, "of those that had gone far", "of which found anything"]
    return ["model", "setting", *measured, "of those that had generated more than a window"]


def survival_rows(tokens: Sequence[int], rows: Sequence[Row]) -> Iterator[list[str]]:
    """A row for each model and setting that was measured with all these outputs. Of those that went far: with the
    longest ones, and how many of them found anything only where there is one column of outputs."""
    found = by(rows, "model", "setting", "output_tokens")
    for model, title in MODELS.items():
        for setting, words in SETTINGS.items():
            of = [found[key] for count in tokens if (key := (model, setting, count)) in found]
            if len(of) < len(tokens):
                continue
            cells = [cell for some in of for cell in (share(survival(some), victims(some)), tax(some).text(".2f"))]
            hits = [str(far_hits(of[-1])) if far_victims(of[-1]) and model not in UNLIMITED else ""]
            yield [title, words, *cells, far(of[-1], model), *(hits if len(tokens) == 1 else [])]
            title = ""


def far(rows: Sequence[Row], model: str) -> str:
    return "" if model in UNLIMITED else share(far_survival(rows), far_victims(rows))


def share(of: Share | None, count: int) -> str:
    return "none" if of is None else f"{of.text()} of {count:,}"


def victims(rows: Iterable[Row]) -> int:
    return sum(row.preemptions for row in rows)


def far_victims(rows: Iterable[Row]) -> int:
    return sum(row.far for row in rows)


def far_hits(rows: Iterable[Row]) -> int:
    return sum(row.far_with_hits for row in rows)


def survival_words(rows: Sequence[Row]) -> str:
    """What the page says of the tables. Raises SystemExit where a model has no rows for it."""
    found = by(rows, "model", "setting", "output_tokens")
    needed = [(model, DEFAULT, FAR) for model in (*WINDOWS, *WITH_STATES, LONG)]
    needed += [(LONG, setting, LONGEST) for setting in (DEFAULT, DENSE)]
    if lacking := [key for key in needed if key not in found]:
        raise SystemExit(f"{SURVIVAL.name}: should have rows of {', '.join(map(str, lacking[0]))}")
    return filled(f"{loads_words(rows)} {far_words(found)} {long_words(found)}")


def far_words(found: Cells) -> str:
    windows = [
        f"{far_hits(some):,} of {far_victims(some):,} with {name}"
        for some, name in ((found[model, DEFAULT, FAR], name) for model, name in WINDOWS.items())
    ]
    states = [some for (model, _, outputs), some in found.items() if model in WITH_STATES and outputs == FAR]
    nothing = [1 - far_hits(some) / far_victims(some) for some in states if far_victims(some)]
    taxes = [tax(some).value for some in states]
    return (
        f"With vLLM's default and outputs of {FAR:,}, of the victims that had gone past their window "
        f"{listed(windows)} found anything again. Of models with states, with either setting, "
        f"{min(nothing):.0%} to {max(nothing):.0%} of the victims that had generated more than a block found nothing, "
        f"and what was computed again is {min(taxes):.1f} to {max(taxes):.1f} times what all requests have."
    )


def long_words(found: Cells) -> str:
    def past(outputs: int) -> str:
        rows = [row for (model, _, of), some in found.items() if (model, of) == (LONG, outputs) for row in some]
        return f"{far_victims(rows):,} of {victims(rows):,}"

    default, dense = (found[LONG, setting, LONGEST] for setting in (DEFAULT, DENSE))
    return (
        f"Of Mistral's victims with either setting {past(FAR)} had generated more than its window with outputs of "
        f"{FAR:,}, and {past(LONGEST)} with {LONGEST:,}, where {share(survival(default), victims(default))} survived, "
        f"with retention `None` {share(survival(dense), victims(dense))}: a request that has filled its windows takes "
        "no more blocks."
    )


def loads_words(rows: Sequence[Row]) -> str:
    """How many loads the figures are of: those of outputs of one length are all served by the same models."""
    outputs_of = defaultdict(list)
    for outputs in sorted({row.output_tokens for row in rows}):
        outputs_of[len({row.seed for row in rows if row.output_tokens == outputs})].append(f"{outputs:,}")
    parts = [f"{count} load{'s' * (count > 1)} with outputs of {listed(of)}" for count, of in outputs_of.items()]
    return f"The figures are of {listed(parts)} tokens."


def listed(parts: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(parts[:-1]), parts[-1])))


def with_survival_words(page: str, rows: Sequence[Row]) -> str:
    """The page with that block anew. Raises SystemExit where it has none, or several."""
    return with_block(page, "what survived", survival_words(rows))


# ---- what swaps gain ----


def live_block(found: Mapping[str, Any]) -> str:
    """What the page says of a run of `benchmarks/live_windows.py`."""
    arms = [arm for arm in dict.fromkeys(run["arm"] for run in found["runs"]) if arm != STOCK]
    order = [arm for arm in (*SETTINGS, *ARMS) if arm in arms]
    others = [arm for arm in order if arm != SWAP]
    over_stock = ratio_table("over unmodified vLLM", [(arm, STOCK) for arm in order], found)
    of_swaps = ratio_table(f"{title(SWAP)}, over", [(SWAP, arm) for arm in others], found)
    words = gain_words(found, [STOCK, *others])
    return f"{filled(setting_words(found))}\n\n{over_stock}\n{of_swaps}\n{filled(words)}"


def ratio_table(head: str, pairs: Sequence[tuple[str, str]], found: Mapping[str, Any]) -> str:
    """A line for each arm and what it is compared with, called by that of both which is not in ``head``."""
    lines = [[head, *FIGURES.values()], ["--"] * (1 + len(FIGURES))]
    for arm, over in pairs:
        name = title(arm if over == STOCK else over)
        lines.append([name, *(text(found, arm, over, figure) for figure in FIGURES)])
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def gain_words(found: Mapping[str, Any], others: Sequence[str]) -> str:
    """Over which of the ``others`` swaps gain, and over which that could not be told."""
    untold = [
        f"of {name} over {listed([title(over) for over in some])}"
        for figure, name in GAINS.items()
        if (some := [over for over in others if not gained(found["ratios"][f"{SWAP} over {over}"][figure], figure)])
    ]
    if not untold:
        return "By the intervals swaps gain tokens/s and mean end-to-end time over each of these and vLLM's defaults."
    return f"By the intervals no gain of swaps could be told {', and '.join(untold)}."


def gained(ratio: Mapping[str, float], figure: str) -> bool:
    """Whether all of a ratio's interval is on the better side of 1: above it for tokens/s, below it for times."""
    return ratio["low"] > 1 if figure == "tok/s" else ratio["high"] < 1


def setting_words(found: Mapping[str, Any]) -> str:
    asked, tokens = found["asked"], f"{found['tokens']:,}"
    same = f"every one of {tokens} tokens was the same"
    if found["ties"] or found["wrong"]:
        same = f"of {tokens} tokens {found['wrong']} differed and {found['ties']} were ties"
    stock, swap = (means(found["runs"], arm) for arm in (STOCK, SWAP))
    return (
        f"With `--requests {asked['requests']} --minutes {asked['minutes']:g}` on {found['machine']['cores']} cores "
        f"(vLLM {found['versions']['vllm']}, {found['blocks']} blocks, p / d {found['price_ratio']:.2f}, "
        f"{len({run['start'] for run in found['runs']})} starts of every arm, load average "
        f"{min(found['loads']):.1f} to {max(found['loads']):.1f}, {found['seconds'] / 60:.0f} minutes in all), {same}. "
        f"Unmodified vLLM made {stock['tok/s']:.0f} tokens/s and preempted {stock['preempted']:.0f} times, which "
        f"recomputed {stock['recomputed_tokens']:,.0f} tokens; always-swap preempted {swap['preempted']:.0f} times and "
        f"moved {swap['moved_bytes'] / 1e6:.0f} MB. Geometric means over starts, in brackets 95% intervals:"
    )


def means(runs: Sequence[Run], arm: str) -> dict[str, float]:
    """Arithmetic ones, over the runs of an arm."""
    some = [run | {"preempted": sum(run["preemptions"].values())} for run in runs if run["arm"] == arm]
    return {
        name: fmean(run[name] for run in some) for name in ("tok/s", "preempted", "recomputed_tokens", "moved_bytes")
    }


def title(arm: str) -> str:
    return "vLLM's defaults" if arm == STOCK else ARMS.get(arm) or SETTINGS[arm]


def text(found: Mapping[str, Any], arm: str, over: str, figure: str) -> str:
    starts = len({run["start"] for run in found["runs"]})
    return Ratio(**found["ratios"][f"{arm} over {over}"][figure], pairs=starts).text()


def with_live_block(page: str, found: Mapping[str, Any]) -> str:
    """The page with that block anew. Raises SystemExit where it has none, or several."""
    return with_block(page, "live windows", live_block(found))


# ---- what is said after a swap and after a recompute ----


def exact_block(rows: Sequence[Run]) -> str:
    """What the page says of docs/exactness.json. Raises SystemExit where a family or one of its cases is missing, where
    there is a family without a title, and for figures of different kinds of CPUs, lengths or prompts."""
    cases = {(row["family"], row["case"]): row for row in rows if row["version"] == EXACT_ON}
    wanted = {(family, case) for family in COMPARED for case in (*PLACES, RECOMPUTED)}
    if lacking := sorted(wanted - cases.keys()):
        raise SystemExit(f"{EXACTNESS.name}: should have rows of vLLM {EXACT_ON} of {', '.join(lacking[0])}")
    if unknown := sorted({family for family, _ in cases} - COMPARED.keys()):
        raise SystemExit(f"{Path(__file__).name}: COMPARED should have a title of {unknown[0]}")
    lines = [["family", "type", "after a swap", "after a recompute"], ["--"] * 4]
    lines += [
        [title, cases[family, RECOMPUTED]["dtype"], swapped(cases, family), outcome(cases[family, RECOMPUTED])]
        for family, title in COMPARED.items()
    ]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    of_one_type = [row for row in rows if (row["version"], row["family"]) == (EXACT_ON, ROUNDED)]
    return f"{filled(cases_words(cases))}\n\n{table}\n{filled(rounded_words(of_one_type))}"


def cases_words(cases: Mapping[tuple[str, str], Run]) -> str:
    """Where the requests were preempted: all of them at the same lengths."""
    once = {(*row["at"], case) for (_, case), row in cases.items() if case in (*PLACES, IN_PREFILL, RECOMPUTED)}
    requests = {(row["prompt_tokens"], row["output_tokens"], row["amx"]) for row in cases.values()}
    at = {case: lengths for *lengths, case in once}
    if len(requests) > 1 or len(at) < len(once):
        raise SystemExit(f"{EXACTNESS.name}: rows should be of one kind of CPU, one request and one length a case")
    ((prompt, output, amx),) = requests
    end, inside, twice = (" and ".join(map(str, at[case])) for case in PLACES)
    prefill = f", and in its prefill ({at[IN_PREFILL][0]} of {prompt} tokens)" if IN_PREFILL in at else ""
    (recomputed,) = at[RECOMPUTED]
    return (
        f"On vLLM {EXACT_ON}'s CPU build and a CPU {'with' if amx else 'without'} AMX, with a prompt of {prompt} "
        f"tokens and an output of {output}. Preempted at a block's end ({end} computed tokens), inside a block "
        f"({inside}), twice ({twice}){prefill}. The recompute is of {recomputed} tokens. The output's tokens are "
        "counted from 0; a difference is the largest up to the first token that differs."
    )


def swapped(cases: Mapping[tuple[str, str], Run], family: str) -> str:
    """After a swap, in all places."""
    rows = {case: cases[family, case] for case in (*PLACES, IN_PREFILL) if (family, case) in cases}
    parts = [f"{case}: {outcome(row)}" for case, row in rows.items() if not row["identical"]] or ["identical"]
    return "; ".join([*parts, *(["not preempted in its prefill"] if IN_PREFILL not in rows else [])])


def outcome(row: Run) -> str:
    """By how much an output differs from the undisturbed one."""
    first, before = row["first_different"], f"log-probabilities differ by up to {bound(row['difference'])}"
    if row["identical"]:
        return "identical"
    if first is None:
        return f"same text, {before}"
    if first == row["at"][0] - row["prompt_tokens"] + 1:
        return f"another text from the first token after it (token {first})"
    return f"another text from token {first} on, {before} before"


def bound(difference: float) -> str:
    """Rounded up to two digits."""
    return f"{float(Context(prec=2, rounding=ROUND_UP).create_decimal(repr(difference))):g}".replace("e-0", "e-")


def rounded_words(rows: Sequence[Run]) -> str:
    """How many of all recomputes of full attention in that type said the same."""
    some = {(row["seed"], *row["at"]): row for row in rows if row["kind"] == "recompute"}
    lengths = sorted({at[0] for _, *at in some if len(at) == 1})
    twice = sorted({" and ".join(map(str, at)) for _, *at in some if len(at) > 1})
    if len(lengths) == 1:
        raise SystemExit(f"{EXACTNESS.name}: should have rows of test_recomputes_of_full_attention_in_bfloat16")
    also = f", and after two preemptions, at {', '.join(twice)}" if twice else ""
    said = f"{sum(row['identical'] for row in some.values())} of {len(some)} recomputes"
    return (
        f"With full attention alone, in bfloat16, the output after {said} of Llama was identical: of requests with "
        f"{len({seed for seed, *_ in some})} prompts, after one preemption at {listed([*map(str, lengths)])} computed "
        f"tokens{also} (`test_recomputes_of_full_attention_in_bfloat16`, in the long suite)."
    )


def with_exact_block(page: str, rows: Sequence[Run]) -> str:
    """The page with that block anew. Raises SystemExit where it has none, or several."""
    return with_block(page, "exactness", exact_block(rows))


# ---- the page ----


def with_block(page: str, name: str, words: str) -> str:
    start, end = f"<!-- {name} -->", f"<!-- {name}: end -->"
    block = re.compile(rf"{start}\n.*?{end}", re.DOTALL)
    if len(block.findall(page)) != 1:
        raise SystemExit(f"{PAGE.name}: `{start}` should stand once, with `{end}`")
    return block.sub(lambda _: f"{start}\n\n{words}\n\n{end}", page)


def filled(words: str) -> str:
    return textwrap.fill(words, WIDTH, break_long_words=False, break_on_hyphens=False)


def text_of(found: Mapping[str, Any]) -> str:
    """The JSON, a line for every entry and every run."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items() if name != "runs"]
    runs = ",\n".join(map(json.dumps, found["runs"]))
    return "{\n" + ",\n".join(lines) + f',\n"runs": [\n{runs}\n]\n' + "}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--live", type=Path, metavar="FILE", help="what benchmarks/live_windows.py wrote")
    live = parser.parse_args().live
    if not (live or LIVE).is_file():
        parser.error(f"{live or LIVE} is no file: --live should name what benchmarks/live_windows.py wrote")
    found = json.loads((live or LIVE).read_text())
    try:
        _, rows = parsed(SURVIVAL)
    except InputError as error:
        parser.error(str(error))
    refuse_partial(rows)
    page = with_survival_words(drawn(PAGE.read_text(), rows), rows)
    PAGE.write_text(with_exact_block(with_live_block(page, found), json.loads(EXACTNESS.read_text())))
    LIVE.write_text(text_of(found))


if __name__ == "__main__":
    main()
