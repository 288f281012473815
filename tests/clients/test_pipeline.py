"""`transformers.pipeline("text-generation")`."""

import pytest
import transformers

from tests.clients.conftest import ANSWER, CHAT_TEMPLATE, QUESTION, same_with_attach

pytestmark = pytest.mark.clients
# The one with sliding windows.
ONE_MODEL = pytest.mark.parametrize("miniature", ["gemma3"], indirect=True)
GREEDY = {"do_sample": False, "max_new_tokens": 12}
SAMPLED = {"do_sample": True, "top_p": 0.9, "temperature": 1.1, "max_new_tokens": 12}
TEXTS = [
    QUESTION,
    "Enter the NURSE and",
    ANSWER,
    "KING: My",
    "First Citizen: Before we proceed any further, hear me",
]
CHAT = [
    {"role": "system", "content": "You speak in verse."},
    {"role": "user", "content": QUESTION},
]


@pytest.fixture
def pipe(miniature):
    model, tokenizer = miniature
    tokenizer.padding_side, tokenizer.chat_template = "left", CHAT_TEMPLATE
    return transformers.pipeline("text-generation", model=model, tokenizer=tokenizer)


@pytest.mark.parametrize("how", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_text(pipe, how):
    (answer,), info = same_with_attach(pipe.model, lambda: pipe(QUESTION, **how))
    assert len(answer["generated_text"]) > len(QUESTION)
    assert (info.calls, info.hits) == (1, 0)
    assert len(info.caches) == 1


def test_chat_messages(pipe):
    (answer,), info = same_with_attach(pipe.model, lambda: pipe(CHAT, **GREEDY))
    assert answer["generated_text"][-1]["role"] == "assistant"
    assert (info.calls, len(info.caches)) == (1, 1)


@ONE_MODEL
@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_a_batch(pipe, batch_size):
    answers, info = same_with_attach(
        pipe.model, lambda: pipe(TEXTS, batch_size=batch_size, **GREEDY)
    )
    assert len(answers) == len(TEXTS)
    calls = -(-len(TEXTS) // batch_size)
    assert (info.calls, info.hits) == (calls, calls - 1)


@ONE_MODEL
def test_repeated_calls_share_a_cache(pipe):
    def program():
        return [
            pipe(TEXTS[number % 3], **(SAMPLED if number % 2 else GREEDY)) for number in range(4)
        ]

    _, info = same_with_attach(pipe.model, program)
    assert (info.calls, info.hits, len(info.caches)) == (4, 3, 1)


@ONE_MODEL
def test_several_answers_and_beams(pipe):
    def program():
        return [
            pipe(QUESTION, num_return_sequences=3, **SAMPLED),
            pipe(QUESTION, num_beams=3, **GREEDY),
        ]

    answers, info = same_with_attach(pipe.model, program)
    assert [len(answer) for answer in answers] == [3, 1]
    assert (info.calls, info.hits) == (2, 1)


def test_a_chat_of_several_turns_reuses_its_prefix(pipe):
    def program():
        messages = list(CHAT)
        for text in (ANSWER, "Enter the NURSE", "And then?"):
            messages = pipe(messages, **GREEDY)[0]["generated_text"]
            messages = [*messages, {"role": "user", "content": text}]
        return messages

    messages, info = same_with_attach(pipe.model, program, reuse_prefix=True)
    assert len(messages) == len(CHAT) + 6
    assert (info.calls, info.hits) == (3, 2)
    assert info.reused_tokens > len(pipe.tokenizer(QUESTION).input_ids)
