"""`TextStreamer`, and `TextIteratorStreamer` with `generate` in a thread of its own."""

from threading import Thread

import pytest
from transformers import TextIteratorStreamer, TextStreamer

from tests.clients.conftest import ANSWER, QUESTION, same_with_attach

pytestmark = pytest.mark.clients
NEW_TOKENS = 12
TEXTS = (QUESTION, ANSWER)


def inputs_of(model, tokenizer, text):
    inputs = tokenizer(text, return_tensors="pt").to(model.device)
    return {**inputs, "max_new_tokens": NEW_TOKENS, "do_sample": False}


def test_text_streamer(miniature, capsys):
    model, tokenizer = miniature

    def program():
        capsys.readouterr()
        streamer = TextStreamer(tokenizer, skip_prompt=True)
        tokens = [
            model.generate(**inputs_of(*miniature, text), streamer=streamer).tolist()
            for text in TEXTS
        ]
        return tokens, capsys.readouterr().out

    (tokens, printed), info = same_with_attach(model, program)
    assert printed == "".join(
        tokenizer.decode(row[len(tokenizer(text).input_ids) :]) + "\n"
        for text, (row,) in zip(TEXTS, tokens, strict=True)
    )
    assert (info.calls, info.hits) == (2, 1)


def streamed(model, tokenizer, text):
    """The pieces of text as they come from another thread."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60)
    thread = Thread(
        target=model.generate, kwargs={**inputs_of(model, tokenizer, text), "streamer": streamer}
    )
    thread.start()
    pieces = list(streamer)
    thread.join()
    return pieces


def test_text_iterator_streamer(miniature):
    model, _ = miniature
    pieces, info = same_with_attach(
        model, lambda: [streamed(*miniature, text) for text in (*TEXTS, QUESTION)]
    )
    assert len(pieces[0]) > 3
    assert pieces[0] == pieces[2] != pieces[1]
    assert (info.calls, info.hits) == (3, 2)


def test_two_streams_at_once(miniature):
    """A server: each request has a thread, and their tokens come in turns."""
    model, tokenizer = miniature

    def program():
        streamers = [TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=60) for _ in TEXTS]
        threads = [
            Thread(
                target=model.generate, kwargs={**inputs_of(*miniature, text), "streamer": streamer}
            )
            for text, streamer in zip(TEXTS, streamers, strict=True)
        ]
        [thread.start() for thread in threads]
        pieces = [list(streamer) for streamer in streamers]
        [thread.join() for thread in threads]
        return pieces

    _, info = same_with_attach(model, program)
    assert info.calls == 2
    assert 1 <= len(info.caches) <= 2
