"""Markdown tables of what the package computes and no benchmark measures:

bytes of caches, and the rewrite rules.
"""

from __future__ import annotations

import inspect
import re

import torch
from record_figures import MODELS
from tables import table

from hf_static_kv import cache_bytes
from hf_static_kv.program.rules import RULES
from hf_static_kv.testing import dev_config


def cache_sizes() -> str:
    """Bytes of a `StaticContiguousCache` for the dev models in bfloat16, batch 1."""

    def sizes(model: str, sliding: str = "full") -> list[str]:
        found = [
            cache_bytes(dev_config(model), n, dtype=torch.bfloat16, sliding=sliding)
            for n in (1024, 8192, 32768)
        ]
        return [f"{num_bytes / 2**20:,.0f} MiB" for num_bytes in found]

    rows = [[name, *sizes(model)] for model, name in MODELS.items()]
    for model, name in MODELS.items():
        if getattr(dev_config(model), "sliding_window", None):
            rows.append([f'{name}, `sliding="compact"`', *sizes(model, "compact")])
    return table(["`max_cache_len`", "1,024", "8,192", "32,768"], rows)


def rank_sizes() -> str:
    """Bytes on each rank of a tensor-parallel dev model in bfloat16, batch 1, 32,768 positions."""

    def mib(model: str, ranks: int) -> str:
        try:
            return f"{cache_bytes(dev_config(model), 32768, dtype=torch.bfloat16, tp=ranks) >> 20:,} MiB"
        except ValueError:
            return "refused"

    heads = {model: dev_config(model).num_key_value_heads for model in MODELS}
    rows = [
        [f"{name} ({heads[model]})", *(mib(model, ranks) for ranks in (1, 2, 4))]
        for model, name in MODELS.items()
    ]
    return table(
        ["KV heads in brackets", "one process", "each of 2 ranks", "each of 4 ranks"], rows
    )


def rules() -> str:
    """The rewrite rules in their order: name, picture, whether a rule keeps the bits."""
    rows = [
        [f"`{name}`", picture(rule.apply.__doc__ or ""), "yes" if rule.keeps_bits else "no"]
        for name, rule in RULES.items()
    ]
    return table(["rule", "picture", "keeps the bits"], rows)


def picture(docstring: str) -> str:
    """The first picture of a rule's docstring in one line; what stands two spaces apart is a
    remark.

    >>> picture("y = f(x)  (some models)   ->   z = gf(x)      one token\\nz = g(y)")
    '`y = f(x)` (some models), `z = g(y)` → `z = gf(x)` (one token)'
    """

    def code_and_remark(text: str) -> str:
        code, *remarks = re.split(r"\s{2,}", text.strip())
        return " ".join([f"`{code}`", *(f"({remark.strip('()')})" for remark in remarks)])

    first, *others = inspect.cleandoc(docstring).split("\n\n")[0].splitlines()
    before, after = first.split("->")
    return f"{', '.join(map(code_and_remark, [before, *others]))} → {code_and_remark(after)}"
