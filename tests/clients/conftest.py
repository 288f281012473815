"""A program runs without `attach` and with it; the tokens must agree, and the cache must have been
ours.
"""

from functools import cache

import pytest
import torch

from hf_static_kv import attach, attachment, detach, served
from hf_static_kv.testing import MINIATURES, load_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
QUESTION, ANSWER = (
    "ROMEO: What lady is that?",
    "JULIET: Good pilgrim, you do wrong your hand too much.",
)
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(autouse=True)
def _prompts_of_any_length(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)


@cache
def _miniature(name):
    return load_model(name, device=DEVICE)


@pytest.fixture(params=MINIATURES)
def miniature(request):
    """A trained model and its tokenizer, shared: a test leaves them as they were."""
    model, tokenizer = _miniature(request.param)
    yield model, tokenizer
    detach(model)


def same_with_attach(model, program, **settings):
    """What `program()` returns is the same without and with `attach`; returns it and the
    attachment.
    """
    torch.manual_seed(0)
    expected = program()
    attach(model, **settings)
    torch.manual_seed(0)
    assert program() == expected
    return expected, attachment(model)
