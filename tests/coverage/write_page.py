"""Writes docs/coverage.md from the records of `measure`. What holds at both ends of transformers is
written once.

python -m tests.coverage.write_page
"""

import json
from collections.abc import Callable, Iterable
from pathlib import Path

from tests.coverage.measure import MODEL_ITSELF, NOT_MEASURED, OWN_CACHE, RECORDS, REFUSED, YES, Row

PAGE = Path(__file__).parents[2] / "docs" / "coverage.md"
NEWEST, OLDEST = "5.23", "5.17"
Records = dict[str, Row]

HEAD = """# Coverage

What each decoder of transformers gets: every type of `AutoModelForCausalLM`, built small with random weights and run in
float32 on a CPU. `make coverage` measures them and writes this page; a test measures a sample again. Reasons are the
beginnings of the package's own messages.

- **cache**: with `StaticContiguousCache` the greedy tokens and logits of `generate` are those of `use_cache=False`, for
  a prompt of 13 tokens and for a batch with left padding. Windows are shorter than both.
- **captured step**: `GraphDecoder` gives the same tokens by a recorded list of operations, which a GPU captures as a
  graph. Where a pass cannot be recorded, the step runs the model itself: a GPU captures it unless it
  [synchronizes](how-it-works.md#the-program). What falls back runs in the loop of `generate`, with the same cache.
- **captured prompt**: from its second time on, a prompt of some size is a recorded list as well, which is padded to that
  size; the tokens are the same. Elsewhere the model computes prompts.
- **exact**: inside [`exact`](exact.md) a prompt in chunks has the bits of the whole prompt without a cache.

Encoders (BERT) are built with `is_decoder=True`, encoder-decoders (BART) as their decoder alone. Models with images or
audio get text. `attach` uses what a decoder has, and leaves a refused one as it is.
"""


def page(newest: Records, oldest: Records) -> str:
    parts = [
        HEAD,
        counts({NEWEST: newest, OLDEST: oldest}),
        *sections(newest),
        difference(newest, oldest),
    ]
    return "\n".join(parts)


def counts(records: dict[str, Records]) -> str:
    rows: list[tuple[str, Callable[[Row], bool]]] = [
        ("decoders", lambda row: True),
        ("**cache**: the same tokens", lambda row: row["cache"] == YES),
        (
            "of these compared with transformers' own cache",
            lambda row: row.get("compared with") == OWN_CACHE,
        ),
        ("refused by name, with the reason", lambda row: row["cache"].startswith(REFUSED)),
        ("not measured", lambda row: row["cache"].startswith(NOT_MEASURED)),
        ("other tokens", lambda row: "other tokens" in row.values()),
        ("**captured step**: a recorded list", lambda row: row.get("step") == YES),
        (MODEL_ITSELF, lambda row: row.get("step") == MODEL_ITSELF),
        ("falls back", lambda row: row.get("step") not in (None, YES, MODEL_ITSELF)),
        ("**captured prompt**: a recorded list", lambda row: row.get("prompt") == YES),
        ("**exact**: the same bits", lambda row: row.get("exact") == YES),
        ("refused", lambda row: row.get("exact") not in (None, YES)),
    ]
    numbers = [
        (name, *(sum(map(holds, rows.values())) for rows in records.values()))
        for name, holds in rows
    ]
    return table(("transformers", *records), numbers)


def sections(rows: Records) -> Iterable[str]:
    served = {name: row for name, row in rows.items() if row["cache"] == YES}
    gained = ("step", "prompt", "exact")
    whole = [n for n, row in served.items() if {row.get(name) for name in gained} == {YES}]
    yield f"## With captured steps and prompts, and exact\n\n{listed(whole)}.\n"
    others = {
        name: tuple(row.get(key, "") for key in gained)
        for name, row in served.items()
        if name not in whole
    }
    head = "decoders", "captured step", "captured prompt", "exact"
    yield f"## With the cache\n\n{table(head, grouped(others))}"
    yield (
        "Operations without a batch-invariant kernel belong to routers and experts (`histc`, "
        "`scatter_`, `index_add`), recurrent layers\n(`convolution`) and complex numbers "
        "(`polar`).\n"
    )
    loose = [name for name, row in served.items() if row["compared with"] == OWN_CACHE]
    yield (
        "Without a cache these give other logits than with transformers' own cache, and were "
        f"compared with that:\n{listed(loose)}.\n"
    )
    refused = {
        name: (row["cache"].removeprefix(REFUSED),)
        for name, row in rows.items()
        if row["cache"] != YES
    }
    yield f"## Refused, or not measured\n\n{table(('decoders', 'reason'), grouped(refused))}"


def difference(newest: Records, oldest: Records) -> str:
    """The rows of the oldest transformers that are not those of the newest."""
    lines = [f"## In transformers {OLDEST}\n", "As above, but for these rows.\n"]
    if missing := [name for name in newest if name not in oldest]:
        lines.append(f"Not there yet: {listed(missing)}.\n")
    names = ("cache", "compared with", "step", "prompt", "exact")
    other = {
        name: (row["cache"].removeprefix(REFUSED), *(row.get(key, "") for key in names[1:]))
        for name, row in oldest.items()
        if row != newest.get(name)
    }
    head = "decoders", "cache", "compared with", "captured step", "captured prompt", "exact"
    lines.append(table(head, grouped(other)))
    return "\n".join(lines)


def grouped(rows: dict[str, tuple[str, ...]]) -> list[tuple[str, ...]]:
    """One row for all names with the same values, the largest groups first."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, values in rows.items():
        groups.setdefault(values, []).append(name)
    ordered = sorted(groups.items(), key=lambda group: (-len(group[1]), group[1]))
    return [(listed(names), *values) for values, names in ordered]


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(head: tuple[str, ...], rows: Iterable[tuple[object, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def load(version: str) -> Records:
    return json.loads((RECORDS / f"{version}.json").read_text())


if __name__ == "__main__":
    PAGE.write_text(page(load(NEWEST), load(OLDEST)))
