"""A metric for `evaluate`, usable offline: do two runs give the same tokens, and if not, where do
they first differ?

>>> TokenAgreement().compute(predictions=[[5, 6, 7], [1, 2]], references=[[5, 6, 8], [1, 2]])
{'exact_match': 0.5, 'common_prefix': [2, 2]}
"""

from __future__ import annotations

import datasets
import evaluate


def common_prefix(one: list[int], other: list[int]) -> int:
    """Number of tokens before the first that differs."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


class TokenAgreement(evaluate.Metric):
    """`exact_match`: the share of equal runs; `common_prefix`: for each run, tokens before the
    first difference.
    """

    def _info(self) -> evaluate.MetricInfo:
        tokens = datasets.Sequence(datasets.Value("int64"))
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: lists of token ids, one list for each run",
            features=datasets.Features({"predictions": tokens, "references": tokens}),
        )

    def _compute(self, predictions: list[list[int]], references: list[list[int]]) -> dict:
        pairs = list(zip(predictions, references, strict=True))
        return {
            "exact_match": sum(list(one) == list(other) for one, other in pairs) / len(pairs),
            "common_prefix": [common_prefix(one, other) for one, other in pairs],
        }
