"""What was chosen at each step of a generation, from what: plain data, ready for JSON.

recorder = StepRecorder(best=5, tokenizer=tokenizer)
tokens = model.generate(**inputs, logits_processor=[recorder])
recorder.steps(tokens)[0]        the steps of the first row
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase


class StepRecorder(LogitsProcessor):
    """A logits processor that changes nothing and notes the scores that it is given, after the processors before it.

    Takes part in one call of `generate`; call `steps` with what that returned.
    """

    def __init__(self, best: int = 5, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if best < 1:
            raise ValueError(f"best must be at least 1, got {best}.")
        self.best, self.tokenizer = best, tokenizer
        self.prompt_len = 0
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # best tokens, their logs, entropy
        self._chosen: list[torch.Tensor] = []
        self._logs: torch.Tensor | None = None  # of the newest step, whose token is not known yet

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not self._seen:
            self.prompt_len = input_ids.shape[1]  # none where the prompt is vectors
        else:
            self._take(input_ids[:, -1])
        logs = scores.float().log_softmax(dim=-1)
        top = logs.topk(min(self.best, logs.shape[-1]), dim=-1)
        entropy = -torch.where(logs == -torch.inf, 0.0, logs.exp() * logs).sum(dim=-1)
        self._seen.append((top.indices, top.values, entropy))
        self._logs = logs
        return scores

    def _take(self, tokens: torch.Tensor) -> None:
        if self._logs is not None:
            self._chosen.append(self._logs.gather(-1, tokens[:, None])[:, 0])
            self._logs = None

    def steps(self, sequences: torch.Tensor) -> list[list[dict[str, Any]]]:
        """For each row its steps: token, text, probability, the best tokens with theirs, entropy in nats.

        A row that had ended is recorded no further than its batch: what follows its end is padding.
        """
        new = sequences[:, self.prompt_len :]
        if new.shape[1] == 0 or new.shape[1] > len(self._seen):
            raise ValueError(
                f"{len(self._seen)} steps were recorded and the sequences hold {new.shape[1]} new tokens: pass what "
                "the same call of generate returned."
            )
        if len(self._chosen) < new.shape[1]:
            self._take(new[:, len(self._chosen)])
        return [[self._step(n, row, new[row, n]) for n in range(new.shape[1])] for row in range(len(new))]

    def _step(self, n: int, row: int, token: torch.Tensor) -> dict[str, Any]:
        tokens, logs, entropy = (tensor[row] for tensor in self._seen[n])
        best = [
            {"token": t, "text": self._text(t), "probability": p}
            for t, p in zip(tokens.tolist(), logs.exp().tolist(), strict=True)
        ]
        return {
            "token": int(token),
            "text": self._text(int(token)),
            "probability": self._chosen[n][row].exp().item(),
            "best": best,
            "entropy": entropy.item(),
        }

    def _text(self, token: int) -> str | None:
        return None if self.tokenizer is None else str(self.tokenizer.decode([token]))
