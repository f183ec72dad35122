"""What the prose of docs/caching.md and docs/caching-study.md should say: `python tools/caching_sentences.py`.

Every figure between the tables that docs/caching-policies.json and docs/caching-study.json give, and what is said of
them in words. Prints what is not on its page, and exits 1 then. Figures that a page says to be of an earlier version
are not here: nothing makes them again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvpolicy.stats import Ratio, student_ratio

sys.path.insert(0, str(Path(__file__).resolve().parent))

from caching_tables import (
    AGENTIC,
    ARXIV,
    FILES,
    HELD_OUT,
    HINDSIGHT,
    JUDGED,
    LARGE,
    LINKS,
    MOONCAKE,
    NONE,
    POLICIES,
    POLICIES_PAGE,
    RECORDED,
    SESSIONS,
    SHAREGPT,
    STUDY_PAGE,
    Raw,
    Row,
    Study,
    bars,
    gain_text,
    gigabytes,
    moved,
    share_of,
    three,
    title,
)  # fmt: skip

NATIVE, SLOW, SLOWEST = "native", "5e8", "2.5e8"
SEEDS = 3
"""Of what has an interval; of Mooncake's trace they are stretches."""
SPLIT = 0.5
WITHIN = 0.005
"""Ratios that are called the same differ by less."""


def span(values: Sequence[float], form: str = ".3f") -> str:
    """The least and the largest, or the one that both are."""
    low, high = format(min(values), form), format(max(values), form)
    return low if low == high else f"{low} to {high}"


def saved(ratios: Sequence[float]) -> str:
    """What is left of 1, in percent."""
    return span([1 - one for one in ratios], ".0%").replace("% to", " to")


def so(words: str, holds: bool) -> str:
    """These words, where that holds; else what stands on no page."""
    return words if holds else f"(no longer so) {words}"


# ---- docs/caching.md ----


def judged(raw: Raw) -> Iterator[str]:
    rows = raw.rows(JUDGED)
    room, least, below = bars.with_room(rows), min(rows, key=lambda one: one.of_best), bars.below_best(rows)
    yield f"Over these {len(rows)} rows, of one seed"
    yield f"({len(room)} rows), `cost` saves {bars.mean_gain(room):.3f} times, a geometric mean"
    named = bars.with_room(bars.of_target(rows))
    yield f"{bars.TARGET_NAME} alone, of which the target is, it saves {bars.mean_gain(named):.3f} times"
    yield f"it saves {bars.mean_gain(named):.3f} times ({len(named)} rows)"
    shares = [f"{bars.gap_share(some):.0%}" for some in (room, named)]
    yield f"It takes {shares[0]} of the gap to hindsight on average, {shares[1]} of theirs"
    yield f"of the best of `lru`, `arc` and `s3fifo` is {least.of_best:.3f}, in the second smallest cache of ShareGPT's"
    yield so("in the second smallest cache of ShareGPT's", (title(least.trace), least.share) == (SHAREGPT, 0.02))
    yield so("The target, 0.97, is met in all rows", not below)
    talks, gpt = ([one.gain("lfu") for one in rows if title(one.trace) == trace] for trace in (MOONCAKE, SHAREGPT))
    yield f"it saves up to {max(talks):.2f} times on conversations and {min(gpt):.2f} times on ShareGPT's"


def held_out(raw: Raw) -> Iterator[str]:
    rows = raw.rows(HELD_OUT)
    room, below = bars.with_room(rows), bars.below_best(rows)
    yield f"`--first-seed 10 --seeds 5 --parts 4`, {len(rows)} rows"
    yield f"({len(room)} rows), `cost` saves {gain_text(room).replace(' (', ' times (').removesuffix(')')} over draws)"
    yield so("the target of 1.10 is met", bars.mean_gain(room) >= bars.MIN_GAIN)
    yield f"is met; {bars.gap_share(room):.0%} of the gap on average"
    talks = sorted(of_best(below, MOONCAKE))
    yield f"is missed in {len(below)} rows of {len(rows)}, all of them quarters of the conversations"
    yield so("all of them quarters of the conversations", len(talks) == len(below))
    yield f"of the conversations ({', '.join(f'{one:.3f}' for one in talks)})"
    worst = min(below, key=lambda one: one.of_best)
    yield f"The first is where `s3fifo` alone finds much, {worst.gain('s3fifo'):.2f} times what `lru` does"
    yield f"in a cache of {worst.capacity} blocks; `cost` saves {worst.gain('cost'):.2f} times as much as `lru` there"
    others = [max(one.gain("lru"), one.gain("arc")) >= one.gain("s3fifo") for one in below if one is not worst]
    yield so("In the other three `lru` or `arc` saves more, in the largest caches", all(others) and len(others) == 3)
    arxiv, agents, gpt = (min(of_best(rows, trace)) for trace in (ARXIV, AGENTIC, SHAREGPT))
    yield f"The arXiv trace's quarters ({arxiv:.3f} at least), agentic sessions ({agents:.3f})"
    yield f"agentic sessions ({agents:.3f}) and ShareGPT's ({gpt:.3f}) miss none"
    yield f"of the gap on average, and {bars.gap_share(bars.with_room(bars.of_target(rows))):.0%} of {bars.TARGET_NAME}"


def of_best(rows: Sequence[Row], trace: str) -> list[float]:
    return [one.of_best for one in rows if title(one.trace) == trace]


def splits_in_short(raw: Raw) -> Iterator[str]:
    changes = [half / whole for half, whole in splits(raw.study).values()]
    worse, same = sum(one > 1 + WITHIN for one in changes), sum(abs(one - 1) < WITHIN for one in changes)
    yield so("half of each hit was worse in five of six settings, and as good in the sixth", (worse, same) == (5, 1))


# ---- docs/caching-study.md: at the files' own rates ----


def loaded(raw: Raw) -> Iterator[str]:
    left = max(not_loaded(raw.study.found(MOONCAKE, cache, **LARGE)) for cache in POLICIES)
    yield f"but for {left:.1%} of the tokens of Mooncake's prompts with 1,024 GiB"
    usual = [raw.study.found(requests, cache, **RECORDED[requests]) for requests in RECORDED for cache in POLICIES]
    yield so("All that was found in host memory was loaded, but for", max(map(not_loaded, usual)) < 0.0005)


def not_loaded(found: Mapping[str, Any]) -> float:
    """Share of the tokens of all prompts that were found in host memory and computed."""
    return share_of(found, "host") - share_of(found, "loaded")


def recorded(raw: Raw) -> Iterator[str]:
    """ShareGPT's conversations and agentic sessions."""
    first, whole = (over_none(raw.study, SHAREGPT, figure) for figure in ("ttft_s", "e2e_s"))
    yield f"shortens the time to first token by {saved(first)} and the whole request by {saved(whole)}"
    bare, foreseen = (raw.study.found(SHAREGPT, cache, **RECORDED[SHAREGPT]) for cache in (NONE, HINDSIGHT))
    ttft, e2e = (saved([foreseen[figure]["mean"] / bare[figure]["mean"]]) for figure in ("ttft_s", "e2e_s"))
    yield f"and hindsight by {ttft} and {e2e}: as prompts are short"
    device = [share_of(raw.study.found(AGENTIC, cache, **RECORDED[AGENTIC]), "device") for cache in POLICIES]
    yield so("have nine tenths of their prompts on the device", span(device, ".1f") == "0.9")
    agents = over_none(raw.study, AGENTIC, "ttft_s")
    yield f"the rest is worth {saved(agents)} of the time to first token, by any policy"


def recorded_mooncake(raw: Raw) -> Iterator[str]:
    found = {cache: raw.study.found(MOONCAKE, cache, **RECORDED[MOONCAKE]) for cache in (*POLICIES, HINDSIGHT)}
    yield f"the prompts of the run have {found['lru']['prefix_hits']['prompt_tokens'] / 1e6:.1f} million"
    yield so("Nothing is gained by any policy", min(over_none(raw.study, MOONCAKE, "ttft_s")) > 0.99)
    yield f"hindsight finds {share_of(found[HINDSIGHT], 'host'):.1%} of the tokens there"
    bytes_over = [found["cost"]["moved_bytes"] / found[cache]["moved_bytes"] for cache in POLICIES if cache != "cost"]
    yield so("`cost` moves a third of the bytes that the others do", 0.28 < min(bytes_over) <= max(bytes_over) < 0.39)
    large = {cache: raw.study.over_none(MOONCAKE, cache, **LARGE).value for cache in POLICIES}
    yield f"{saved([*large.values()])} of the time to first token by any policy"
    yield f"by any policy, and {100 * (large['lru'] - large['cost']):.1f} points more with `cost` than with `lru`"
    cost, foreseen = (share_of(raw.study.found(MOONCAKE, one, **LARGE), "host") for one in ("cost", HINDSIGHT))
    yield f"Hindsight finds {100 * (foreseen - cost):.1f} points more of the tokens than `cost`"


def rates(raw: Raw) -> Iterator[str]:
    changes = []
    for requests in (MOONCAKE, AGENTIC):
        bare, *others = (
            raw.study.found(requests, cache, **RECORDED[requests])["throughput_tok_s"] for cache in (NONE, *POLICIES)
        )
        changes += [abs(one / bare - 1) for one in others]
    words = "Throughput is the rate of arrivals in the runs of Mooncake and agentic sessions"
    yield so(words, max(changes) < WITHIN)


def over_none(study: Study, requests: str, figure: str) -> list[float]:
    """Of each policy at the file's own rate: the mean over that without a cache."""
    bare, *others = (study.found(requests, cache, **RECORDED[requests])[figure]["mean"] for cache in (NONE, *POLICIES))
    return [one / bare for one in others]


# ---- above capacity: hints ----


def hinted(study: Study, requests: str, cache: str, hints: str, seeds: int = 1, **other: Any) -> Ratio:
    """Of the mean times to first token with hints to those without."""
    return student_ratio(
        [study.ttft_s(requests, cache, seed, **other | {"hints": hints}) for seed in range(seeds)],
        [study.ttft_s(requests, cache, seed, **other) for seed in range(seeds)],
    )


def above_capacity(raw: Raw) -> Iterator[str]:
    bare = [three(raw.study.ttft_s(requests, NONE)) for requests in (MOONCAKE, AGENTIC, SHAREGPT)]
    yield f"which is {bare[0]} s, {bare[1]} s and {bare[2]} s"
    talks, agents, mooncake = (
        [raw.study.over_none(requests, cache).value for cache in POLICIES] for requests in (SHAREGPT, AGENTIC, MOONCAKE)
    )
    yield so("the time to first token is less than half of that without one", max(talks) < 0.5)
    yield f"with agentic sessions {span(agents, '.2f')}. With Mooncake's"
    yield so("With Mooncake's, 64 GiB hold too little", min(mooncake) > 0.98)


def hints_of_sessions(raw: Raw) -> Iterator[str]:
    def change(requests: str, cache: str, **other: Any) -> float:
        return hinted(raw.study, requests, cache, SESSIONS, **other).value

    arms = [(requests, cache, files) for requests in RECORDED for cache in POLICIES for files in ({}, FILES)]
    ratios = [change(requests, cache, **files) for requests, cache, files in arms]
    usual = [change(requests, cache, load=0.0) for requests in RECORDED for cache in POLICIES]
    yield (
        f"{span(ratios, '.2f')} times the time of the same policy without hints in all rows, and {span(usual)} times "
        "at the rates of the tables above"
    )
    cost, lru = (hinted(raw.study, SHAREGPT, cache, SESSIONS, SEEDS).text() for cache in ("cost", "lru"))
    yield f"over three seeds, it is {cost} by `cost` and {lru} by `lru`"


def hints_in_hindsight(raw: Raw) -> Iterator[str]:
    study = raw.study
    changes = [hinted(study, SHAREGPT, cache, HINDSIGHT).value for cache in POLICIES]
    yield f"with ShareGPT's conversations {span(changes, '.2f')} of the time without hints"
    lru, cost = (hinted(study, SHAREGPT, cache, HINDSIGHT, SEEDS).text() for cache in ("lru", "cost"))
    yield f"over three seeds {lru} by `lru`, {cost} by `cost`"
    talks, agents = (
        [
            span([study.over_none(requests, cache, load=0.0, hints=hints).value for cache in POLICIES])
            for hints in (HINDSIGHT, NONE)
        ]
        for requests in (SHAREGPT, AGENTIC)
    )
    yield f"it is {talks[0]} of the time without a cache, where the policies alone come to {talks[1]}"
    yield f"with agentic sessions {agents[0]} ({agents[1]}); with Mooncake's"
    mooncake = [hinted(study, MOONCAKE, cache, HINDSIGHT, load=0.0).value for cache in POLICIES]
    yield f"with Mooncake's they make {span(mooncake)} of the time without them"


# ---- above capacity: files ----


def files(raw: Raw) -> Iterator[str]:
    study = raw.study
    default = {"file_gib": FILES["file_gib"]}
    talks, mooncake = (
        [study.over_none(one, cache, **FILES).value for cache in POLICIES] for one in (SHAREGPT, MOONCAKE)
    )
    yield f"{span(talks, '.2f')} of the time without a cache, without hints"
    nothing = study.found(SHAREGPT, "lru", **default)["prefix_hits"]["file_tokens"] == 0
    yield so("ShareGPT's conversations found nothing there", nothing)
    yield f"it is faster: {study.over_none(MOONCAKE, 'lru', **default).value:.3f} by `lru`, without hints"
    by_cost = study.over_none(MOONCAKE, "cost", **FILES).value
    yield f"Mooncake's conversations take {span(mooncake)} of the time, {by_cost:.3f} by `cost`"
    cost, lru = (study.found(MOONCAKE, cache, **FILES) for cache in ("cost", "lru"))
    below = [f"{share_of(one, 'host', 'file'):.1%}" for one in (cost, lru)]
    yield f"where it now finds {below[0]}, and `lru` {below[1]}"
    agents, by_cost = (study.over_none(requests, "cost", **FILES).value for requests in (AGENTIC, SHAREGPT))
    yield f"with agentic sessions, now {agents:.3f}"
    yield f"with ShareGPT's conversations, now {by_cost:.3f}"
    yield f"It moves {moved(cost)} GB of Mooncake's instead of 413, and `lru` {moved(lru)}"
    alone = {cache: study.over_none(SHAREGPT, cache).value for cache in (*POLICIES, HINDSIGHT)}
    best = min(alone[cache] for cache in POLICIES)
    yield f"{alone[HINDSIGHT]:.3f} of that without a cache, where the best policy takes {best:.3f}"
    arms = [
        (requests, other) for requests in RECORDED for other in ({}, FILES) if (requests, other) != (AGENTIC, FILES)
    ]
    faster = [
        (requests, cache, hints)
        for requests, other in arms
        for cache in POLICIES
        for hints in (NONE, SESSIONS, HINDSIGHT)
        if study.ttft_s(requests, HINDSIGHT, **other) > study.ttft_s(requests, cache, hints=hints, **other)
    ]
    only, own = [(AGENTIC, "cost", HINDSIGHT)], study.over_none(AGENTIC, "cost", hints=HINDSIGHT, load=1.2).value
    known = study.over_none(AGENTIC, HINDSIGHT, load=1.2).value
    yield so("In this table only agentic sessions by `cost` take less time with hints in hindsight", faster == only)
    yield f"take less time with hints in hindsight ({own:.3f} beside {known:.3f})"
    foreseen, lru_s = (study.over_none(SHAREGPT, cache, **FILES).value for cache in (HINDSIGHT, "lru"))
    yield f"takes {foreseen:.3f} of the time with ShareGPT's conversations, where `lru` in both takes {lru_s:.3f}"
    foreseen, lru_s = (study.over_none(MOONCAKE, cache, **FILES).value for cache in (HINDSIGHT, "lru"))
    yield f"and {foreseen:.3f} with Mooncake's, where that takes {lru_s:.3f}"


def stretches(raw: Raw) -> Iterator[str]:
    """Of Mooncake's trace, with files."""
    study, kinds = raw.study, (SESSIONS, HINDSIGHT)
    cost, lru = (study.over_none(MOONCAKE, cache, SEEDS, **FILES).text() for cache in ("cost", "lru"))
    yield f"it is {cost} by `cost` and {lru} by `lru`: too few to be sure"
    usual = [
        hinted(study, requests, cache, hints, **FILES).value
        for requests in (MOONCAKE, AGENTIC)
        for cache in POLICIES
        for hints in kinds
    ]
    yield f"Hints make {span(usual)} of the time without them in the rows with files"
    over = {
        cache: [hinted(study, MOONCAKE, cache, hints, SEEDS, **FILES) for hints in kinds] for cache in ("lru", "cost")
    }
    means = {cache: span([one.value for one in some], ".2f") for cache, some in over.items()}
    yield f"over the three stretches {means['lru']} by `lru` and {means['cost']} by `cost`"
    yield so("with 1 in every interval", not any(one.significant for some in over.values() for one in some))


# ---- slow links ----


def links(raw: Raw) -> Iterator[str]:
    study = raw.study
    over = [study.over_none(SHAREGPT, "lru", SEEDS, link=link).text() for link in (*LINKS, SLOWEST)]
    yield f"{over[0]} over 2 GB/s, {over[1]} over 1, {over[2]} over 0.5 and {over[3]} over 0.25"
    means = [
        study.over_none(requests, cache, link=link).value
        for requests in RECORDED
        for cache in ("lru", "cost")
        for link in LINKS
    ]
    yield so("a cache over a slow link is better than none, or about the same, in the mean", max(means) < 1 + WITHIN)
    tails = [[study.found(SHAREGPT, cache, link=link)["ttft_s"]["p99"] for cache in ("lru", NONE)]
             for link in (SLOW, SLOWEST)]  # fmt: skip
    yield so("over 0.5 GB/s and below is worse", all(one > bare for one, bare in tails))
    yield f"({three(tails[0][0])} s instead of {three(tails[0][1])})"
    talks, agents = (by_price(study, requests, SLOW) for requests in (SHAREGPT, AGENTIC))
    yield f"deciding by price is worth {1 - talks:.0%} with ShareGPT's conversations and {1 - agents:.0%} with agentic"
    talks, agents = (by_price(study, requests, "1e9") for requests in (SHAREGPT, AGENTIC))
    yield f"and {1 - talks:.0%} and {1 - agents:.0%} over 1 GB/s"
    rest = [*(by_price(study, requests, "2e9") for requests in RECORDED)]
    rest += [by_price(study, MOONCAKE, link) for link in ("1e9", SLOW)]
    yield so("Elsewhere it makes less than 1%", 0.99 < min(rest) <= max(rest) < 1.01)


def by_price(study: Study, requests: str, link: str) -> float:
    """The mean time to first token, by `lru`, over that where everything is loaded."""
    return study.ttft_s(requests, "lru", link=link) / study.ttft_s(requests, "lru", link=link, policy="always-swap")


def splits(study: Study) -> dict[tuple[str, str], tuple[float, float]]:
    """By requests and link: times over those without a cache, where half of each hit is loaded and where all is."""
    places = [*((SHAREGPT, link) for link in (NATIVE, *LINKS)), (AGENTIC, NATIVE), (AGENTIC, LINKS[0])]
    return {
        (requests, link): (
            study.over_none(requests, "lru", link=link, load_share=SPLIT).value,
            study.over_none(requests, "lru", link=link).value,
        )
        for requests, link in places
    }


def split(raw: Raw) -> Iterator[str]:
    found = splits(raw.study)
    text = {place: f"{half:.3f} instead of {whole:.3f}" for place, (half, whole) in found.items()}
    yield f"{text[SHAREGPT, NATIVE]} with ShareGPT's conversations over the data sheet's link"
    for link in LINKS[:2]:
        yield f"{text[SHAREGPT, link]} over {gigabytes(link)} GB/s"
    half, whole = found[SHAREGPT, SLOW]
    yield f"and {half:.3f} beside {whole:.3f} over 0.5 GB/s"
    yield f"with agentic sessions {text[AGENTIC, NATIVE]} over the data sheet's link and {text[AGENTIC, LINKS[0]]} over"


PROSE: Mapping[Path, Sequence[Callable[[Raw], Iterator[str]]]] = {
    POLICIES_PAGE: (judged, held_out, splits_in_short),
    STUDY_PAGE: (
        loaded, recorded, recorded_mooncake, rates, above_capacity, hints_of_sessions, hints_in_hindsight, files,
        stretches, links, split,
    ),
}  # fmt: skip


def unsaid(page: Path, text: str, raw: Raw) -> list[str]:
    """What should be in the text of that page and is not. Line breaks and bold type make no difference."""
    flat = " ".join(text.replace("**", "").split())
    return [one for sentences in PROSE[page] for one in sentences(raw) if one not in flat]


def main() -> int:
    raw = Raw.read()
    missing = [(page, one) for page in PROSE for one in unsaid(page, page.read_text(), raw)]
    for page, one in missing:
        print(f"{page.name} should say: {one}")
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
