"""`generate_batch` and its manager of an attached model: the tokens of `generate`, in transformers'
own result objects.
"""

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from threading import Thread

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig, StoppingCriteriaList
from transformers.generation import utils as generation

from hf_static_kv import attach, attachment, detach, served
from hf_static_kv.batching import BatchManager
from hf_static_kv.decoding.turns import Turns, turns_of
from tests.decoding.conftest import DEVICE, toy_model

GREEDY = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=None, pad_token_id=0)
SECONDS = 60


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)
    monkeypatch.setattr(served, "_DECODER_DEVICES", ("cpu", "cuda"))
    model = toy_model("llama")
    attach(model, max_rows=8)
    yield model
    detach(model)


@pytest.fixture
def manager(model):
    manager = model.init_continuous_batching(GREEDY)
    assert isinstance(manager, BatchManager)
    manager.start()
    yield manager
    manager.destroy()


def prompts(number):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (number,), generator=generator).tolist()
    return [torch.randint(3, 120, (n,), generator=generator).tolist() for n in lengths]


def alone(ids, config=GREEDY, **how):
    ids = torch.tensor([ids], device=DEVICE)
    mask = torch.ones_like(ids)
    model = toy_model("llama")
    output = model.generate(ids, attention_mask=mask, generation_config=config, **how)
    return output[0, ids.shape[1] :].tolist()


def ended(manager, request_id):
    return next(out for out in manager.request_id_iter(request_id) if out.is_finished())


@pytest.mark.parametrize("eos", [None, [5, 6, 7, 8, 9, 10, 11]])
def test_the_tokens_of_generate(model, eos):
    config = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=eos, pad_token_id=0)
    inputs = prompts(30)
    results = model.generate_batch(inputs, config)
    assert list(results) == [f"req_{i}" for i in range(30)]
    for ids, result in zip(inputs, results.values(), strict=True):
        assert result.prompt_ids == ids
        assert result.generated_tokens == alone(ids, config)
        assert result.is_finished()
        assert result.error is None
    assert attachment(model).calls == 30
    assert attachment(model).rows == 0


def test_several_sequences_of_a_prompt(model):
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=20, num_return_sequences=3, eos_token_id=None
    )
    results = {}
    with model.continuous_batching_context_manager(config) as manager:
        manager.add_request(prompts(1)[0])
        deadline = time.monotonic() + SECONDS
        while len(results) < 3 and time.monotonic() < deadline:
            if (result := manager.get_result(timeout=1)) is not None:
                results[result.request_id] = result.generated_tokens
    assert set(results) == {"req_0", "req_0__child#0", "req_0__child#1"}
    assert len(set(map(tuple, results.values()))) == 3


@pytest.mark.parametrize("max_new_tokens", [1, 12])
@pytest.mark.parametrize("is_on_host", [False, True])
def test_sampled_requests_repeat_under_a_seed(model, max_new_tokens, is_on_host, monkeypatch):
    config = GenerationConfig(do_sample=True, top_k=0, max_new_tokens=max_new_tokens)
    if is_on_host:  # the threads of calls select
        monkeypatch.setattr("hf_static_kv.decoding.decoder.selection_of", lambda call: None)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results = model.generate_batch(prompts(12), config)
        runs.append([result.generated_tokens for result in results.values()])
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]
    assert len(set(map(tuple, runs[0]))) > 1


def test_a_request_has_keywords_of_its_own(manager):
    ids = prompts(1)[0]
    short = manager.add_request(ids, max_new_tokens=3)
    assert ended(manager, short).generated_tokens == alone(ids)[:3]
    end = alone(ids)[4]
    stopped = manager.add_request(ids, eos_token_id=end)
    assert ended(manager, stopped).generated_tokens == alone(ids, eos_token_id=end)
    sharp = manager.add_request(ids, do_sample=True, top_k=1)
    assert ended(manager, sharp).generated_tokens == alone(ids)


def test_streaming_and_times(manager):
    ids = prompts(1)[0]
    name = manager.add_request(ids, request_id="mine", streaming=True, record_timestamps=True)
    assert name == "mine"
    outputs = list(manager.request_id_iter("mine"))
    assert [len(output.generated_tokens) for output in outputs] == [*range(1, 21), 20]
    assert [output.is_finished() for output in outputs] == [False] * 20 + [True]
    assert outputs[-1].generated_tokens == alone(ids)
    assert outputs[-1].timestamps == sorted(outputs[-1].timestamps)
    assert len(outputs[-1].timestamps) == 20


@pytest.mark.skipif(DEVICE == "cuda", reason="a token that is none ends the CUDA context")
def test_a_request_that_fails_is_told(manager):
    fails, works = manager.add_request([1000]), manager.add_request([5, 6, 7])
    outputs = {}
    for output in manager:
        outputs[output.request_id] = output
    assert outputs[works].generated_tokens == alone([5, 6, 7])
    assert "index out of range" in outputs[fails].error


def test_a_cancelled_request_is_not_heard_of_again(model):
    config = GenerationConfig(do_sample=False, max_new_tokens=400, eos_token_id=None)
    inputs = prompts(12)
    with model.continuous_batching_context_manager(config) as manager:
        names = [manager.add_request(ids, streaming=n == 0) for n, ids in enumerate(inputs)]
        for name in names[:6]:
            manager.cancel_request(name)
        ends = [output.request_id for output in manager if output.is_finished()]
    # Some may have ended before.
    assert set(names[6:]) <= set(ends) < set(names)
    assert attachment(model).rows == 0


def test_a_cancellation_at_the_end_does_not_reach_the_next_request(manager, monkeypatch):
    deliver = manager.deliver

    def and_cancel(request, status, error=None):
        deliver(request, status, error)
        manager.cancel_request(request.request_id)

    monkeypatch.setattr(Turns, "is_wanted", True)  # each request has a row
    monkeypatch.setattr(manager, "deliver", and_cancel)
    manager._threads = ThreadPoolExecutor(1)
    inputs = prompts(4)
    names = manager.add_requests(inputs)
    results = {result.request_id: result.generated_tokens for result in manager}
    assert [results[name] for name in names] == [alone(ids) for ids in inputs]


@pytest.mark.parametrize("hard_stop", [False, True])
def test_a_request_beside_a_stop_is_refused_or_ends(manager, hard_stop):
    accepted, refused = [], []

    def add():
        try:
            for ids in cycle(prompts(5)):
                accepted.append(manager.add_request(ids, max_new_tokens=3))
                time.sleep(0.001)
        except RuntimeError as error:
            refused.append(str(error))

    threads = [Thread(target=add) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(accepted) < 5:
        time.sleep(0.001)
    manager.stop(hard_stop=hard_stop)
    for thread in threads:
        thread.join(SECONDS)
    ends = [result.request_id for result in manager]
    assert len(refused) == 3
    assert all("call start() before" in reason for reason in refused)
    assert len(ends) == len(set(ends))
    assert set(ends) <= set(accepted) if hard_stop else set(ends) == set(accepted)
    assert attachment(manager.model).rows == 0


def test_no_end_token(model):
    """-1, as in transformers; the model has one."""
    ids = prompts(1)[0]
    model.generation_config.eos_token_id = alone(ids)[2]
    for ends in (-1, None):
        config = GenerationConfig(do_sample=False, max_new_tokens=20, eos_token_id=ends)
        (result,) = model.generate_batch([ids], config).values()
        assert result.generated_tokens == alone(ids)


@pytest.mark.parametrize(
    "field",
    [{"use_cache": False}, {"cache_implementation": "static"}, {"return_dict_in_generate": True}],
)
def test_fields_that_a_manager_does_not_read(model, field):
    """`transformers serve` says `use_cache=False` for its paged cache."""
    config = GenerationConfig(**GREEDY.to_diff_dict(), **field)
    inputs = prompts(4)
    results = model.generate_batch(inputs, config)
    assert [out.generated_tokens for out in results.values()] == [alone(ids) for ids in inputs]
    assert attachment(model).fallbacks == {}
    assert attachment(model).calls == 4


def test_a_model_in_training_mode(model):
    """The manager puts it in evaluation mode, as transformers' own does."""
    model.train()
    model.init_continuous_batching(GREEDY)
    assert not any(module.training for module in model.modules())


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_modes_of_the_caller(model, mode):
    """The caches of one mode serve calls of the others."""
    inputs = prompts(6)
    expected = [alone(ids) for ids in inputs]
    model.generate(torch.tensor([inputs[0]], device=DEVICE), generation_config=GREEDY)
    for context in (mode, torch.no_grad, torch.inference_mode):
        with context():
            results = model.generate_batch(inputs, GREEDY)
            ids = torch.tensor([inputs[0]], device=DEVICE)
            single = model.generate(ids, generation_config=GREEDY)
        assert [out.generated_tokens for out in results.values()] == expected
        assert single[0, ids.shape[1] :].tolist() == expected[0]
    assert attachment(model).fallbacks == {}


def test_keywords_are_not_passed_beside_a_config(manager, monkeypatch):
    """A call of `generate` with both is deprecated."""
    warnings = []
    monkeypatch.setattr(generation.logger, "warning_once", warnings.append)
    name = manager.add_request(prompts(1)[0], max_new_tokens=3, eos_token_id=5)
    assert len(ended(manager, name).generated_tokens) == 3
    assert warnings == []


def test_requests_that_wait_end_with_the_manager(model):
    attach(model, max_rows=2)
    manager = model.init_continuous_batching(GREEDY)
    manager.start()
    for ids in prompts(30):
        manager.add_request(ids, max_new_tokens=200)
    begin = time.monotonic()
    manager.destroy()
    assert time.monotonic() - begin < SECONDS
    assert not manager._requests
    assert attachment(model).rows == 0


def test_results_in_an_event_loop(manager):
    inputs = prompts(5)

    async def answers():
        loop = asyncio.get_running_loop()
        futures = []
        for n, ids in enumerate(inputs):
            futures.append(loop.create_future())
            manager.register_result_handler(f"request {n}", futures[-1].set_result)
            manager.add_request(ids, request_id=f"request {n}")
        return await asyncio.wait_for(asyncio.gather(*futures), SECONDS)

    results = asyncio.run(answers())
    assert [result.generated_tokens for result in results] == [alone(ids) for ids in inputs]


def test_a_handler_that_comes_after_results(manager):
    """As in `transformers serve`, which registers after `add_request`."""
    one, other = prompts(2)

    async def answer():
        manager.add_request(one, request_id="one", streaming=True)
        manager.add_request(other, request_id="other")
        while manager._requests:
            await asyncio.sleep(0.01)
        results = asyncio.Queue()
        manager.register_result_handler("one", results.put_nowait)
        return [await asyncio.wait_for(results.get(), SECONDS) for _ in range(21)]

    results = asyncio.run(answer())
    assert [len(result.generated_tokens) for result in results] == [*range(1, 21), 20]
    assert results[-1].generated_tokens == alone(one)
    assert ended(manager, "other").generated_tokens == alone(other)
    assert manager.get_result(timeout=0) is None


def test_a_cancelled_request_leaves_no_handler(manager):
    """A client that leaves; the same id may come again."""
    ids = prompts(1)[0]
    router = manager.output_router

    async def answer():
        results = asyncio.Queue()
        manager.register_result_handler("mine", results.put_nowait)
        manager.add_request(ids, request_id="mine", streaming=True, max_new_tokens=400)
        await asyncio.wait_for(results.get(), SECONDS)
        manager.cancel_request("mine")
        assert not router.result_handlers
        future = asyncio.get_running_loop().create_future()
        manager.register_result_handler("mine", future.set_result)
        manager.add_request(ids, request_id="mine")
        return await asyncio.wait_for(future, SECONDS)

    assert asyncio.run(answer()).generated_tokens == alone(ids)
    assert not router.result_handlers
    assert router.output_queue.empty()


def test_a_request_that_is_alone_ends_when_it_is_cancelled(manager):
    request = manager.add_request(prompts(1)[0], max_new_tokens=100_000)
    while not turns_of(manager.model).is_mine and turns_of(manager.model).is_free:
        time.sleep(0.001)  # it has not begun
    manager.cancel_request(request)
    manager.stop(timeout=SECONDS)
    assert not manager._requests


def test_an_id_of_a_request_that_runs(manager):
    manager.add_request(prompts(1)[0], request_id="mine", max_new_tokens=400)
    with pytest.raises(ValueError, match="mine has not ended"):
        manager.add_request(prompts(1)[0], request_id="mine")


def test_an_exit_in_a_criterion_is_a_failure(manager):
    def leave(ids, scores, **kwargs):
        raise SystemExit("the worker ends")

    request = manager.add_request(prompts(1)[0], stopping_criteria=StoppingCriteriaList([leave]))
    assert ended(manager, request).error == "the worker ends"


def test_a_handler_whose_event_loop_is_closed(manager):
    async def register():
        manager.register_result_handler("mine", lambda result: None)

    asyncio.run(register())
    manager.add_request(prompts(1)[0], request_id="mine")
    assert ended(manager, "mine").generated_tokens == alone(prompts(1)[0])
    assert not manager.output_router.result_handlers


def test_seeds_do_not_come_from_a_generator_that_a_trial_sets_back(manager):
    state = torch.get_rng_state()
    seeds = set()
    for ids in prompts(20):
        torch.set_rng_state(state)
        request = manager.add_request(ids, do_sample=True, max_new_tokens=1)
        seeds.add(manager._requests[request].seed)
    assert len(seeds) == 20


def test_a_call_inside_a_pause_does_not_end_it(model, manager):
    for ids in prompts(3):
        manager.add_request(ids, max_new_tokens=400)
    loop = attachment(model).decoder.loop_of(model)
    with manager.pause():
        before = loop.num_tokens
        ids = torch.tensor([prompts(1)[0]], device=DEVICE)
        model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=GREEDY)
        assert turns_of(model).is_mine
        assert loop.num_tokens == before


def test_a_pause_lets_no_pass_begin(manager):
    ids = prompts(1)[0]
    with manager.pause():
        name = manager.add_request(ids)
        assert manager.get_result(timeout=0.2) is None
    assert ended(manager, name).generated_tokens == alone(ids)


def test_what_is_not_served_is_left_to_transformers(model, monkeypatch):
    asked = ContinuousBatchingConfig(return_logprobs=True)
    manager = model.init_continuous_batching(GREEDY, continuous_batching_config=asked)
    assert not isinstance(manager, BatchManager)
    reason = "generate_batch: log probabilities are asked for"
    assert attachment(model).fallback_reason == reason
    monkeypatch.setattr(served, "_DECODER_DEVICES", ())
    assert not isinstance(model.init_continuous_batching(GREEDY), BatchManager)
    detach(model)
    assert not isinstance(model.init_continuous_batching(GREEDY), BatchManager)


def test_a_manager_that_does_not_run(model):
    manager = model.init_continuous_batching(GREEDY)
    with pytest.raises(RuntimeError, match=r"call start\(\) before add_request\(\)"):
        manager.add_request([5])
    with pytest.raises(RuntimeError, match=r"call start\(\)"), manager.pause():
        pass
    manager.stop()
