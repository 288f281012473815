"""Calls of several threads decode together, and each gives what it would have given alone."""

import gc
import sys
import threading
import time
import weakref
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from hf_static_kv import attach, attachment, cache_bytes, compat, detach, served
from hf_static_kv.decoding import call as call_module
from hf_static_kv.decoding import loop as loop_module
from hf_static_kv.decoding import prompts, steps
from hf_static_kv.decoding.call import Call
from hf_static_kv.decoding.loop import Loop
from hf_static_kv.decoding.steps import Steps
from hf_static_kv.decoding.tokens import Tokens
from hf_static_kv.decoding.turns import Turns, turns_of
from tests.conftest import Collect
from tests.decoding.conftest import DEVICE, toy_model
from tests.fuzz import company

SECONDS = 60


@pytest.fixture(autouse=True)
def _decodes_on_any_device(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
    monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))


def prompt(number, length=6):
    generator = torch.Generator().manual_seed(number)
    return torch.randint(3, 120, (1, length), generator=generator).to(DEVICE)


def call(model, number=0, length=6, new=30, **how):
    ids = prompt(number, length)
    how = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "max_new_tokens": new} | how
    return model.generate(ids, attention_mask=torch.ones_like(ids), **how)


class Threads:
    """Runs functions in threads; their results, or errors, in order."""

    def __init__(self):
        self.threads = []
        self.results = []

    def start(self, function, *args, **kwargs):
        place = len(self.results)
        self.results.append(None)

        def run():
            try:
                self.results[place] = function(*args, **kwargs)
            except BaseException as error:
                self.results[place] = error

        self.threads.append(threading.Thread(target=run, daemon=True))
        self.threads[-1].start()

    def join(self):
        for thread in self.threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in self.threads)
        return self.results


class Gate(Collect):
    """A streamer that waits after some tokens, until it is opened."""

    def __init__(self, after=3):
        super().__init__()
        self.after = after
        self.is_waiting = threading.Event()
        self.is_open = threading.Event()

    def put(self, value):
        super().put(value)
        if len(self.values) > self.after and not self.is_open.is_set():
            self.is_waiting.set()
            assert self.is_open.wait(SECONDS)

    def end(self):
        pass


def loop_of(model):
    return attachment(model).decoder.loop_of(model)


@pytest.fixture
def model():
    model = toy_model("gemma3")
    attach(model)
    yield model
    detach(model)


class Waits:
    """A criterion that waits at some length until it is opened: its call has a row meanwhile."""

    def __init__(self, length=9):
        self.length = length
        self.is_waiting = threading.Event()
        self.is_open = threading.Event()

    def __call__(self, ids, scores, **kwargs):
        if ids.shape[1] >= self.length:
            self.is_waiting.set()
            assert self.is_open.wait(SECONDS)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)


def in_company(model, *calls, new=60, name="gemma3"):
    """The results of these functions while another call has a row."""
    plain = toy_model(name)
    waits, threads = Waits(), Threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "is_wanted", True)  # no call goes on by itself
        threads.start(call, model, 99, new=new, stopping_criteria=[waits])
        assert waits.is_waiting.wait(SECONDS)
        for function in calls:
            threads.start(function)
        for thread in threads.threads[1:]:
            thread.join(SECONDS)
        waits.is_open.set()
        first, *others = threads.join()
    assert torch.equal(first, call(plain, 99, new=new))
    deadline = time.monotonic() + SECONDS
    while loop_of(model).num_rows and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loop_of(model).num_rows == 0
    return others


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "mixtral"])
def test_tokens_are_those_of_each_call_alone(name):
    plain, model = toy_model(name), toy_model(name)
    attach(model)
    threads = Threads()
    for number in range(12):
        threads.start(call, model, number, 3 + 5 * number, 20 + 3 * number)
    results = threads.join()
    for number, got in enumerate(results):
        assert torch.equal(got, call(plain, number, 3 + 5 * number, 20 + 3 * number))
    assert loop_of(model).num_tokens > 0
    assert attachment(model).rows == attachment(model).queue == 0


def test_a_stuck_streamer_keeps_nobody_waiting(model):
    plain = toy_model("gemma3")
    gate, threads = Gate(), Threads()
    threads.start(call, model, 0, streamer=gate)
    assert gate.is_waiting.wait(SECONDS)
    for number in (1, 2, 3):
        threads.start(call, model, number)
    for thread in threads.threads[1:]:
        thread.join(SECONDS)
    assert threads.threads[0].is_alive()
    gate.is_open.set()
    results = threads.join()
    assert all(torch.equal(got, call(plain, n)) for n, got in enumerate(results))
    assert gate.tokens == results[0][0].tolist()


def test_a_stuck_criterion_keeps_nobody_waiting(model):
    plain = toy_model("gemma3")
    is_waiting, is_open = threading.Event(), threading.Event()

    def waits(ids, scores, **kwargs):
        if ids.shape[1] == 12:
            is_waiting.set()
            assert is_open.wait(SECONDS)
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    threads = Threads()
    threads.start(call, model, 0, stopping_criteria=[waits])
    assert is_waiting.wait(SECONDS)
    assert torch.equal(call(model, 1), call(plain, 1))
    is_open.set()
    assert torch.equal(threads.join()[0], call(plain, 0))


def test_an_error_ends_its_own_call_only(model):
    def fails(ids, scores, **kwargs):
        if ids.shape[1] > 20:
            raise ZeroDivisionError
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    plain = toy_model("gemma3")
    first, second = in_company(
        model, lambda: call(model, 0, stopping_criteria=[fails]), lambda: call(model, 1)
    )
    assert isinstance(first, ZeroDivisionError)
    assert torch.equal(second, call(plain, 1))
    assert loop_of(model).num_rows == 0


def test_a_streamer_that_goes_away_frees_its_row(model):
    class GoesAway(Collect):
        def put(self, value):
            super().put(value)
            if len(self.values) > 5:
                raise BrokenPipeError

    (first,) = in_company(model, lambda: call(model, 0, new=200, streamer=GoesAway()))
    assert isinstance(first, BrokenPipeError)
    assert not attachment(model).pool.in_use


def test_a_pass_that_fails_ends_all_calls_and_the_next_ones_run(model, monkeypatch):
    def fails(self, done):
        raise ZeroDivisionError("on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(Turns, "is_wanted", True)
        patch.setattr(Loop, "_collect", fails)
        threads = Threads()
        for number in range(3):
            threads.start(call, model, number)
        assert all(isinstance(got, ZeroDivisionError) for got in threads.join())
    assert loop_of(model).num_rows == 0
    plain = toy_model("gemma3")
    (got,) = in_company(model, lambda: call(model, 1))
    assert torch.equal(got, call(plain, 1))


def test_a_pass_that_fails_is_an_error_of_its_own_for_each_call(model, monkeypatch):
    def fails(self, done):
        raise ZeroDivisionError("on purpose")

    monkeypatch.setattr(Turns, "is_wanted", True)
    monkeypatch.setattr(Loop, "_collect", fails)
    threads = Threads()
    for number in range(3):
        threads.start(call, model, number)
    errors = threads.join()
    assert len({id(error) for error in errors}) == 3
    assert not loop_of(model)._asked  # it would hold the model


def test_a_trial_that_overwrites_rows_ends_the_calls_that_have_them(model, monkeypatch):
    verify, waits, threads = steps.verify, Waits(), Threads()

    def overwrites(step, call):
        verify(step, call)
        if call.is_in_rows and len(call.seq_start) == 2:
            for group in call.cache.storage_groups:
                group.keys[:, 0] = 1.0
            raise ZeroDivisionError

    monkeypatch.setattr(steps, "verify", overwrites)
    monkeypatch.setattr(Turns, "is_wanted", True)
    threads.start(call, model, 0, stopping_criteria=[waits])
    assert waits.is_waiting.wait(SECONDS)
    threads.start(call, model, 1)
    threads.threads[1].join(SECONDS)
    waits.is_open.set()
    assert [type(error) for error in threads.join()] == [steps.RowsOverwritten] * 2


def test_rows_may_be_taken_while_the_loop_looks_at_them(model):
    loop, is_over = loop_of(model), threading.Event()
    seat = SimpleNamespace(is_running=True)

    def come_and_go():
        while not is_over.is_set():
            for row in range(8):
                loop._seated[row] = seat
            loop._seated.clear()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=come_and_go)
    thread.start()
    try:
        for _ in range(20000):
            assert all(one is seat for one in loop._running.values())
    finally:
        sys.setswitchinterval(interval)
        is_over.set()
        thread.join()


class Ends(Collect):
    """A streamer whose end waits for a call of another thread."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def end(self):
        threads = Threads()
        threads.start(call, self.model, 1)
        self.others = threads.join()


def test_the_end_of_a_stream_keeps_nobody_waiting(model):
    streamer = Ends(model)
    got = call(model, 0, streamer=streamer)
    plain = toy_model("gemma3")
    assert torch.equal(got, call(plain, 0))
    assert torch.equal(streamer.others[0], call(plain, 1))


def test_calls_that_keep_caches_run_after_a_pass_that_fails(monkeypatch):
    def fails(self, done):
        raise ZeroDivisionError("on purpose")

    plain, model = toy_model("gemma3"), toy_model("gemma3")
    info = attach(model, reuse_prefix=True)
    hows = {}, {"return_dict_in_generate": True}
    with monkeypatch.context() as patch:
        patch.setattr(Turns, "is_wanted", True)
        patch.setattr(Loop, "_collect", fails)
        threads = Threads()
        for number, how in enumerate(hows):
            threads.start(call, model, number, length=24, **how)
        assert all(isinstance(got, ZeroDivisionError) for got in threads.join())
    assert not info.pool.in_use
    calls = [partial(call, model, n, length=24, **how) for n, how in enumerate(hows)]
    got, returned = in_company(model, *calls)
    assert torch.equal(got, call(plain, 0, length=24))
    assert torch.equal(returned.sequences, call(plain, 1, length=24))
    for text, own in (
        (got, {}),
        (returned.sequences, {"past_key_values": returned.past_key_values}),
    ):
        how = {"attention_mask": torch.ones_like(text[:, :50]), "max_new_tokens": 5}
        how |= {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        if own:
            own["past_key_values"].crop(-10)
        assert torch.equal(
            model.generate(text[:, :50], **how, **own), plain.generate(text[:, :50], **how)
        )


@pytest.mark.parametrize("how", [{}, {"return_dict_in_generate": True}])
def test_a_pass_that_fails_after_the_last_token_takes_a_returned_cache_only(how, monkeypatch):
    plain, model = toy_model("gemma3"), toy_model("gemma3")
    attach(model, reuse_prefix=True)
    keep = Loop._keep

    def and_fail_first(self, request):
        self._fail(ZeroDivisionError("on purpose"))
        keep(self, request)

    monkeypatch.setattr(Turns, "is_wanted", True)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_keep", and_fail_first)
        if how:
            with pytest.raises(RuntimeError, match="this cache with it"):
                call(model, 0, length=24, **how)
        else:
            assert torch.equal(call(model, 0, length=24), call(plain, 0, length=24))
    assert not attachment(model).pool.in_use
    assert torch.equal(call(model, 0, length=24), call(plain, 0, length=24))


def test_calls_beyond_max_rows_wait_for_a_row():
    plain, model = toy_model("llama"), toy_model("llama")
    attach(model, max_rows=2)
    most = 0
    seat = Loop._seat

    def noting(self, *args):
        nonlocal most
        seat(self, *args)
        most = max(most, self.num_rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_seat", noting)
        threads = Threads()
        for number in range(8):
            threads.start(call, model, number, new=25)
        results = threads.join()
    assert all(torch.equal(got, call(plain, n, new=25)) for n, got in enumerate(results))
    assert most == 2


def test_the_storage_grows_while_calls_run(model, monkeypatch):
    plain = toy_model("gemma3")
    monkeypatch.setattr(loop_module, "_CAPACITY", 16)
    lengths = (6, 200, 300, *range(5, 25))
    others = in_company(
        model, *(lambda n=n, length=length: call(model, n, length, 40) for n, length in enumerate(lengths)),
        new=150,
    )  # fmt: skip
    for n, (length, got) in enumerate(zip(lengths, others, strict=True)):
        assert torch.equal(got, call(plain, n, length, 40))
    assert loop_of(model)._cache.max_cache_len >= 340


def test_a_long_prompt_lets_others_decode_between_its_parts(model, monkeypatch):
    monkeypatch.setattr(prompts, "DEVICES", (DEVICE,))
    monkeypatch.setattr(prompts, "SIZES", (16,))
    plain = toy_model("gemma3")
    for _ in range(3):
        call(model, 0, 100)
    seen = loop_of(model).num_tokens
    numbers = []
    append = prompts.append_prompt

    def noting(*args):
        numbers.append(loop_of(model).num_tokens)
        time.sleep(0.02)
        return append(*args)

    monkeypatch.setattr(prompts, "append_prompt", noting)
    threads = Threads()
    with monkeypatch.context() as patch:
        patch.setattr(Turns, "is_wanted", True)
        threads.start(call, model, 1, new=150)
        while loop_of(model).num_tokens == seen:
            time.sleep(0.001)
        threads.start(call, model, 0, 100)
        results = threads.join()
    assert torch.equal(results[0], call(plain, 1, new=150))
    assert torch.equal(results[1], call(plain, 0, 100))
    assert len(numbers) >= 7
    assert numbers[-1] - numbers[-7] >= 5


@pytest.mark.parametrize(
    "how",
    [
        {"min_new_tokens": 12, "eos_token_id": ...},
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"eos_token_id": ...},
        {"max_time": 30.0},
    ],
    ids=["least", "penalty", "ngram", "ends", "time"],
)
def test_what_selects_and_ends_a_call_is_its_own(model, how):
    plain = toy_model("gemma3")
    if "eos_token_id" in how:  # what would come
        how = {**how, "eos_token_id": call(plain, 0)[0, 9:25].unique().tolist()}
    others = in_company(model, lambda: call(model, 0, **how), lambda: call(model, 1))
    assert torch.equal(others[0], call(plain, 0, **how))
    assert torch.equal(others[1], call(plain, 1))


class TestSampling:
    def test_company_does_not_change_the_numbers_of_a_call(self, model, monkeypatch):
        """A seed is drawn at its start, and with that seed the call alone gives the same tokens."""
        seeds = []
        join = Tokens.join_others

        def noting(self, is_first):
            join(self, is_first)
            if self.config.do_sample:
                seeds.append(self.generator.initial_seed())

        monkeypatch.setattr(Tokens, "join_others", noting)
        how = {"do_sample": True, "temperature": 0.8, "top_k": 40, "top_p": 0.9}
        (got,) = in_company(model, lambda: call(model, 1, **how), new=100)
        plain = toy_model("gemma3")
        torch.manual_seed(seeds[0])
        assert torch.equal(got, call(plain, 1, **how))

    @pytest.mark.parametrize("how", [{}, {"renormalize_logits": True}], ids=["device", "host"])
    def test_a_call_that_began_alone_has_the_tokens_of_its_seed(self, how, model, monkeypatch):
        plain = toy_model("gemma3")
        how = {"do_sample": True, "top_k": 50, **how}
        torch.manual_seed(5)
        expected = call(plain, 0, **how)
        count, seen = 0, loop_of(model)

        def after_some(self):
            nonlocal count
            count += 1
            return count > 8

        torch.manual_seed(5)
        monkeypatch.setattr(Turns, "is_wanted", property(after_some))
        assert torch.equal(call(model, 0, **how), expected)
        assert seen.num_tokens > 0 or "renormalize_logits" in how

    def test_a_call_beside_a_slow_stream_draws_other_numbers(self, model, monkeypatch):
        """The row of the first has ended, and its streamer has not."""
        monkeypatch.setattr(Turns, "is_wanted", True)
        how = {"do_sample": True, "top_k": 0}
        gate, threads = Gate(), Threads()
        threads.start(call, model, 0, streamer=gate, **how)
        assert gate.is_waiting.wait(SECONDS)
        while loop_of(model).num_rows:
            time.sleep(0.001)
        second = call(model, 0, **how)
        gate.is_open.set()
        results = [*threads.join(), second, call(model, 0, **how)]
        assert len({tuple(got[0].tolist()) for got in results}) == 3

    def test_later_calls_draw_other_numbers(self, model, monkeypatch):
        """What a call has drawn in company is not drawn again."""
        monkeypatch.setattr(Turns, "is_wanted", True)
        how = {"do_sample": True, "top_k": 0}
        torch.manual_seed(5)
        threads = Threads()
        for _ in range(3):
            threads.start(call, model, 0, **how)
        results = [*threads.join(), call(model, 0, **how), call(model, 0, **how)]
        assert len({tuple(got[0].tolist()) for got in results}) == len(results)


def test_a_returned_cache_holds_the_sequence(model):
    plain = toy_model("gemma3")
    (got,) = in_company(model, lambda: call(model, 0, return_dict_in_generate=True))
    cache = got.past_key_values
    assert torch.equal(got.sequences, call(plain, 0))
    assert cache.get_seq_length() == got.sequences.shape[1] - 1
    more = torch.cat([got.sequences, prompt(3)], dim=1)
    how = {"attention_mask": torch.ones_like(more), "max_new_tokens": 5, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0}
    continued = model.generate(more, past_key_values=cache, **how)
    assert torch.equal(continued, plain.generate(more, **how))


def test_a_returned_cache_that_began_with_less_memory_grows(model, monkeypatch):
    plain, pool = toy_model("gemma3"), attachment(model).pool
    run = Loop.run

    def with_memory(self, *args):
        pool.max_bytes = None
        return run(self, *args)

    def returned():
        pool.free.clear()
        pool.max_bytes = pool.bytes_beside() + 100 * cache_bytes(model.config, 1)
        return call(model, 0, length=60, new=150, return_dict_in_generate=True)

    monkeypatch.setattr(Loop, "run", with_memory)
    (got,) = in_company(model, returned)
    assert torch.equal(got.sequences, call(plain, 0, length=60, new=150))
    assert got.past_key_values.get_seq_length() == 209


def test_a_prefix_is_kept_of_a_call_in_company():
    plain, model = toy_model("gemma3"), toy_model("gemma3")
    info = attach(model, reuse_prefix=True)
    (text,) = in_company(model, lambda: call(model, 0))
    more = torch.cat([text, prompt(3)], dim=1)
    how = {"attention_mask": torch.ones_like(more), "max_new_tokens": 5, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0}
    before = info.reused_tokens
    assert torch.equal(model.generate(more, **how), plain.generate(more, **how))
    assert info.reused_tokens - before == text.shape[1] - 1


def test_what_a_window_has_dropped_before_the_row_is_not_reused():
    plain, model = toy_model("gemma3"), toy_model("gemma3")
    info = attach(model, reuse_prefix=True)
    in_company(model, lambda: call(model, 0, length=190))
    info.pool.free.clear()
    ids = torch.cat([prompt(0, 190)[:, :40], prompt(3)], dim=1)
    how = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}
    how |= {"eos_token_id": None, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **how), plain.generate(ids, **how))


def test_unlike_calls_in_company_share_a_cache_with_captured_prompts(monkeypatch):
    """A prompt that is captured is computed several times: its tokens must still be known."""
    monkeypatch.setattr(prompts, "DEVICES", (DEVICE,))
    plain, model = toy_model("gemma3"), toy_model("gemma3")
    info = attach(model, reuse_prefix=True)
    for turn in range(3):
        numbers = range(3 * turn, 3 * turn + 3)
        got = in_company(model, *(partial(call, model, n, length=24, new=8) for n in numbers))
        expected = [call(plain, n, length=24, new=8) for n in numbers]
        assert all(map(torch.equal, got, expected))
    assert info.captured_prompts
    # That of the call which held the others up, and the one that they have shared.
    assert len(info.caches) <= 2
    assert len(info.pool.histories) >= 8


def test_a_cache_that_a_call_has_exchanged_serves_another_thread():
    """Its prefix is of the model as it was. The call goes on elsewhere, for as long as it likes."""
    plain, model = toy_model("gemma3"), toy_model("gemma3")
    attach(model, reuse_prefix=True)
    call(model, 0, length=24)
    for own in (plain, model):
        own.model.layers[0].self_attn.v_proj.weight.data.mul_(2)
    threads, waiting = Threads(), [Waits(30), Waits(30)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "is_wanted", True)  # no call goes on by itself
        hows = {}, {"return_dict_in_generate": True}  # the second one keeps the cache of the first
        for number, (waits, how) in enumerate(zip(waiting, hows, strict=True)):
            how |= {"stopping_criteria": [waits]}
            threads.start(call, model, number, length=24, **how)
            assert waits.is_waiting.wait(SECONDS)
        threads.start(call, model, 2, length=24)
        threads.threads[-1].join(SECONDS)
        for waits in waiting:
            waits.is_open.set()
        first, second, third = threads.join()
    got = first, second.sequences, third
    assert all(torch.equal(own, call(plain, n, length=24)) for n, own in enumerate(got))


def test_a_prompt_beside_rows_is_computed_as_if_there_were_none(monkeypatch):
    """While it decodes, `generate` gives experts code that copies weights for every token."""
    decoding = []

    @contextmanager
    def optimized(model):
        decoding.append(model)
        yield
        decoding.remove(model)

    monkeypatch.setattr(compat, "optimized_for_decode", optimized)
    seen = []
    prefill = Call.prefill
    monkeypatch.setattr(Call, "prefill", lambda own: [seen.append(len(decoding)), prefill(own)][1])
    model = toy_model("gemma3")
    attach(model)
    in_company(model, *(partial(call, model, number) for number in range(3)))
    assert seen == [0] * 4


def test_a_look_at_the_model_serves_all_calls_that_had_begun(model, monkeypatch):
    looks = []
    look = call_module.pass_state
    monkeypatch.setattr(call_module, "pass_state", lambda *args: [looks.append(1), look(*args)][1])
    turns, threads = turns_of(model), Threads()
    turns.take()
    for number in range(4):
        threads.start(call, model, number)
    deadline = time.monotonic() + SECONDS
    while turns.num_waiting < 4 and time.monotonic() < deadline:
        time.sleep(0.001)
    turns.release()
    threads.join()
    assert len(looks) == 1
    call(model, 0)
    assert len(looks) == 2


def test_exact_calls_decode_together():
    plain, model = toy_model("llama").bfloat16(), toy_model("llama").bfloat16()
    attach(model, exact=True)
    threads = Threads()
    for number in range(4):
        threads.start(call, model, number, new=12)
    results = threads.join()
    attach(plain, exact=True)
    assert all(torch.equal(got, call(plain, n, new=12)) for n, got in enumerate(results))


def test_calls_with_other_settings_do_not_share_a_pass(monkeypatch):
    base = type(toy_model("llama"))

    class Signed(base):
        def forward(
            self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None,
            sign: float = 1.0, **kwargs,
        ):  # fmt: skip
            given = {"attention_mask": attention_mask, "position_ids": position_ids}
            output = super().forward(input_ids, past_key_values=past_key_values, **given, **kwargs)
            output.logits = output.logits * sign
            return output

    plain, model = toy_model("llama"), toy_model("llama")
    plain.__class__ = model.__class__ = Signed
    attach(model)
    monkeypatch.setattr(Turns, "is_wanted", True)
    threads = Threads()
    for number, sign in enumerate((1.0, -1.0, 1.0)):
        threads.start(call, model, number, new=100, sign=sign)
    for number, (sign, got) in enumerate(zip((1.0, -1.0, 1.0), threads.join(), strict=True)):
        assert torch.equal(got, call(plain, number, new=100, sign=sign))


def test_embeddings_have_a_row(model):
    plain = toy_model("gemma3")
    embeds = plain.get_input_embeddings()(prompt(0)).detach()
    how = {
        "inputs_embeds": embeds,
        "attention_mask": torch.ones_like(prompt(0)),
        "do_sample": False,
    }
    how |= {"max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}
    (got,) = in_company(model, lambda: model.generate(**how))
    assert torch.equal(got, plain.generate(**how))


def test_a_step_that_runs_the_model_serves_one_call(model, monkeypatch):
    monkeypatch.setattr(Steps, "_recorded_step", lambda *args: None)
    plain = toy_model("gemma3")
    if DEVICE == "cuda":
        pytest.skip("there it is a graph")
    results = in_company(model, *(lambda n=n: call(model, n) for n in range(3)))
    assert all(torch.equal(got, call(plain, n)) for n, got in enumerate(results))


def test_a_call_inside_a_criterion_needs_no_row_of_its_own():
    plain, model = toy_model("llama"), toy_model("llama")
    attach(model, max_rows=2)
    both = threading.Barrier(2)

    def asks(ids, scores, **kwargs):
        if ids.shape[1] == 10:
            both.wait(SECONDS)
            assert torch.equal(call(model, 7, new=5), call(plain, 7, new=5))
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "is_wanted", True)
        threads = Threads()
        for number in range(2):
            threads.start(call, model, number, stopping_criteria=[asks])
        results = threads.join()
    assert all(torch.equal(got, call(plain, n)) for n, got in enumerate(results))


def test_a_function_of_the_caller_keeps_nobody_waiting(model):
    plain = toy_model("gemma3")
    is_waiting, is_open = threading.Event(), threading.Event()

    def allowed(row, ids):
        if len(ids) == 10:
            is_waiting.set()
            assert is_open.wait(SECONDS)
        return list(range(3, 120))

    threads = Threads()
    threads.start(call, model, 0, prefix_allowed_tokens_fn=allowed)
    assert is_waiting.wait(SECONDS)
    assert torch.equal(call(model, 1), call(plain, 1))
    is_open.set()
    assert torch.is_tensor(threads.join()[0])


def test_the_first_token_may_be_the_last(model):
    plain = toy_model("gemma3")
    end = int(call(plain, 0)[0, 6])
    how = {"eos_token_id": end, "return_dict_in_generate": True}

    class Slow(Collect):
        def put(self, value):
            super().put(value)
            time.sleep(0.05)

    (got,) = in_company(model, lambda: call(model, 0, streamer=Slow(), **how))
    assert got.sequences.shape[1] == 7
    assert got.past_key_values.get_seq_length() == 6


def test_a_cache_that_is_back_in_the_pool_tells_nothing_of_its_last_call(model, monkeypatch):
    """Another call may be in the middle of a pass on it."""
    give_back = Call.give_back_cache

    def and_begin(self):
        cache = self.cache
        give_back(self)
        cache._pass.take("keys", 0)

    monkeypatch.setattr(Call, "give_back_cache", and_begin)
    monkeypatch.setattr(Turns, "is_wanted", True)
    call(model, 0)
    assert attachment(model).why_unserved is None


def bytes_of_a_call(model):
    """What its cache takes in the pool."""
    info = attach(model)
    call(model, 0)
    taken = info.pool.num_bytes
    detach(model)
    return taken


def test_rows_count_for_max_bytes():
    model = toy_model("llama")
    one = bytes_of_a_call(model)
    info, most = attach(model, max_bytes=9 * one), 0
    seat = Loop._seat

    def noting(self, *args):
        nonlocal most
        seat(self, *args)
        most = max(most, info.pool.num_bytes + self.memory_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loop, "_seat", noting)
        patch.setattr(Turns, "is_wanted", True)
        threads = Threads()
        for number in range(8):
            threads.start(call, model, number, 6 if number % 2 else 200, 100)
        assert all(map(torch.is_tensor, threads.join()))
    assert 0 < most <= 9 * one


def test_rows_of_calls_that_have_ended_leave_their_memory_to_the_next_one():
    model = toy_model("llama")
    one = bytes_of_a_call(model)
    info = attach(model, max_bytes=10 * one)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Turns, "is_wanted", True)
        threads = Threads()
        for number in range(8):
            threads.start(call, model, number, new=240)
        threads.join()
    deadline = time.monotonic() + SECONDS
    while loop_of(model).num_rows and time.monotonic() < deadline:
        time.sleep(0.001)
    assert loop_of(model).memory_bytes > 5 * one
    got = call(model, 0, length=600)
    assert info.fallback_reason is None
    assert torch.equal(got, call(toy_model("llama"), 0, length=600))


def test_no_memory_for_rows_leaves_each_call_by_itself(model, monkeypatch):
    plain = toy_model("gemma3")
    monkeypatch.setattr(type(loop_of(model)), "_storage", lambda *args: no_memory())
    results = in_company(model, *(lambda n=n: call(model, n) for n in range(3)))
    assert all(torch.equal(got, call(plain, n)) for n, got in enumerate(results))
    assert loop_of(model).num_tokens == 0


def no_memory():
    from hf_static_kv.cache.request import Fallback

    raise Fallback("there is no memory")


def after_calls():
    """A model whose calls have ended, and the thread of the loop too."""
    model = toy_model("llama")
    attach(model)
    threads = Threads()
    for number in range(4):
        threads.start(call, model, number)
    threads.join()
    while loop_of(model)._thread is not None:
        time.sleep(0.001)
    return model


def test_nothing_is_left_of_a_detached_model():
    model = after_calls()
    loop = weakref.ref(loop_of(model))
    storage = weakref.ref(loop()._cache.storage_groups[0])
    gc.disable()
    try:
        detach(model)
        assert storage() is None
    finally:
        gc.enable()
    assert loop() is None


def test_a_model_is_freed():
    model = after_calls()
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("seed", range(6))
def test_random_histories(seed, monkeypatch):
    monkeypatch.setattr(Tokens, "join_others", company.note_generators(Tokens.join_others))
    wrong, _ = company.run_history(seed)
    assert wrong == []


def test_layers_that_ask_for_the_length_decode_alone():
    """Llama 4 scales queries by the length of the cache, of which rows have several."""
    model, plain = toy_model("llama4", floor_scale=4), toy_model("llama4", floor_scale=4)
    attach(model)
    torch.manual_seed(0)
    calls = [partial(call, model, number) for number in range(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tests.decoding.test_loop.toy_model", lambda name: plain)
        others = in_company(model, *calls, name="llama4")
    for number, tokens in enumerate(others):
        assert torch.equal(tokens, call(plain, number))
    detach(model)
