"""What was chosen at each step of a generation, from what: plain data, ready for JSON.

recorder = StepRecorder(best=5, tokenizer=tokenizer)
tokens = model.generate(**inputs, logits_processor=[recorder])
recorder.steps(tokens)[0]        the steps of the first row
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedTokenizerBase

_REMEDY = (
    "Beams put other rows in the place of a row, and assisted decoding tries tokens that it does not keep: neither can "
    "be recorded. Record greedy decoding or sampling, with a new StepRecorder for each call, or read `steps` before "
    "the next one."
)


class StepRecorder(LogitsProcessor):
    """A logits processor that changes nothing and notes the scores that it is given, after the processors before it.

    Holds the record of one call of `generate`: call `steps` with what that returned. That ends the record, and so does
    another prompt; a call that goes on with a text is the next step of its record until `steps` was called.
    """

    def __init__(self, best: int = 5, tokenizer: PreTrainedTokenizerBase | None = None) -> None:
        if best < 1:
            raise ValueError(f"best must be at least 1, got {best}.")
        self.best, self.tokenizer = best, tokenizer
        self.prompt_len = 0
        self._seen: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []  # best tokens, their logs, entropy
        self._chosen: list[torch.Tensor] = []
        self._logs: torch.Tensor | None = None  # of the newest step, whose token is not known yet
        self._ids = torch.empty(0, 0)  # the text before the newest step
        self._is_one_text = torch.tensor(True)  # each step's text was the one before and a token; read at the end
        self._was_read = False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._is_next(input_ids):
            self._is_one_text = self._is_one_text & (input_ids[:, :-1] == self._ids).all()
            self._take(input_ids[:, -1])
        else:
            self._begin(input_ids)
        logs = scores.float().log_softmax(dim=-1)
        top = logs.topk(min(self.best, logs.shape[-1]), dim=-1)
        entropy = -torch.where(logs == -torch.inf, 0.0, logs.exp() * logs).sum(dim=-1)
        self._seen.append((top.indices, top.values, entropy))
        self._logs, self._ids = logs, input_ids.clone()
        return scores

    def _is_next(self, input_ids: torch.Tensor) -> bool:
        """By its shape: to look at the tokens would wait for the device at every step."""
        rows, length = self._ids.shape
        return bool(self._seen) and not self._was_read and input_ids.shape == (rows, length + 1)

    def _begin(self, input_ids: torch.Tensor) -> None:
        """A new record, unless this may be the same call: a text that goes on from the prompt of the record."""
        prompt = self._ids[:, : self.prompt_len]
        is_longer = bool(self._seen) and len(prompt) == len(input_ids) and input_ids.shape[1] > self.prompt_len
        if is_longer and not self._was_read and torch.equal(input_ids[:, : self.prompt_len], prompt):
            raise ValueError(f"This text has the prompt of the record and is not its next step. {_REMEDY}")
        self.prompt_len = input_ids.shape[1]  # none where the prompt is vectors
        self._seen, self._chosen, self._logs, self._was_read = [], [], None, False
        self._is_one_text = torch.ones((), dtype=torch.bool, device=input_ids.device)

    def _take(self, tokens: torch.Tensor) -> None:
        if self._logs is not None:
            self._chosen.append(self._logs.gather(-1, tokens[:, None])[:, 0])
            self._logs = None

    def steps(self, sequences: torch.Tensor) -> list[list[dict[str, Any]]]:
        """For each row its steps: token, text, probability, the best tokens with theirs, entropy in nats.

        A row that had ended is recorded no further than its batch: what follows its end is padding.
        """
        sequences = sequences.to(self._ids.device)
        self._check(sequences)
        self._was_read = True
        new = sequences[:, self.prompt_len :]
        if len(self._chosen) < new.shape[1]:
            self._take(new[:, len(self._chosen)])
        return [[self._step(n, row, new[row, n]) for n in range(new.shape[1])] for row in range(len(new))]

    def _check(self, sequences: torch.Tensor) -> None:
        new = sequences.shape[1] - self.prompt_len
        if not 0 < new <= len(self._seen):
            raise ValueError(
                f"{len(self._seen)} steps were recorded and the sequences hold {new} new tokens: pass what the same "
                f"call of generate returned. {_REMEDY}"
            )
        known = self._ids[:, : sequences.shape[1]]
        if not bool(self._is_one_text) or not torch.equal(sequences[:, : known.shape[1]], known):
            raise ValueError(
                "The sequences are not the texts whose steps were recorded: pass what the same call of generate "
                f"returned. {_REMEDY}"
            )

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
