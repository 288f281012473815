"""`generate_batch` of an attached model: each request is a call of `generate`, in a thread of its own,
and calls of several threads decode together.

    model.generate_batch(prompts, generation_config)       # transformers' own method and results
    manager = model.init_continuous_batching(generation_config)

transformers decodes such requests with a paged cache of its own. Of an attached model they have the
rows, captured steps and prompts of all other calls.
"""

import asyncio
import copy
import queue
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from types import SimpleNamespace
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from hf_static_kv import compat
from hf_static_kv.decoding.call import OWNER, Owner
from hf_static_kv.decoding.decoder import GraphDecoder
from hf_static_kv.decoding.seats import Cancelled
from hf_static_kv.decoding.turns import turns_of

_WAITING = 4  # calls beside those that have a row: prepared when one is free


@dataclass(eq=False)
class _Request(Owner):
    request_id: str
    prompt: list[int]
    how: dict[str, Any]  # keywords of `generate`
    is_streamed: bool
    timestamps: list[float] | None
    seed: int | None
    created: float = field(default_factory=time.perf_counter)
    begun: float = -1
    tokens: list[int] = field(default_factory=list)
    is_cancelled: bool = False


class _Watch(BaseStreamer):
    """Tells of each token of a request."""

    def __init__(self, manager: "BatchManager", request: _Request) -> None:
        self._manager = manager
        self._request = request
        self._is_prompt = True

    def put(self, value: torch.Tensor) -> None:
        request = self._request
        if request.is_cancelled:
            raise Cancelled
        if self._is_prompt:
            self._is_prompt = False
            return
        request.tokens += value.tolist()
        if request.timestamps is not None:
            request.timestamps.append(time.perf_counter())
        if request.is_streamed:
            self._manager.deliver(request, "DECODING")

    def end(self) -> None:
        pass


class BatchManager:
    """Has the methods of transformers' `ContinuousBatchingManager`."""

    def __init__(
        self, model: Any, config: GenerationConfig, batching_config: Any, decoder: GraphDecoder
    ) -> None:
        self.model = model.eval()  # as transformers' manager does; TRL relies on it
        self.generation_config = config
        self.continuous_batching_config = batching_config
        self.num_return_sequences = config.num_return_sequences or 1
        self.background_thread_status = SimpleNamespace(fatal_error=None)
        self.warmed_up = True  # the first requests capture what they need
        self._parts = compat.continuous_batching()
        self.output_router = self._parts.OutputRouter()
        self._decoder = decoder
        self._config = _config_of_calls(config)
        self._requests: dict[str, _Request] = {}  # that have not ended
        self._counter = 0
        self._lock = Lock()
        self._threads: ThreadPoolExecutor | None = None
        # Of the seeds of requests: torch's own may be set back while a step is tried.
        self._generator = torch.Generator()

    # --- control

    def warmup(self) -> None:
        pass

    def is_running(self) -> bool:
        return self._threads is not None

    def start(self) -> None:
        if self._threads is None:
            self._generator.manual_seed(int(torch.randint(1 << 62, ())))
            name = "hf_static_kv batch"
            self._threads = ThreadPoolExecutor(self._decoder.max_rows + _WAITING, name)

    def stop(
        self,
        block: bool = True,
        timeout: float | None = None,
        keep_for_next_session: bool = False,
        hard_stop: bool = False,
    ) -> None:
        """Take no more requests. Those that are there end as usual; with `hard_stop` they are
        cancelled.
        """
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is None:
            return
        if hard_stop:
            for request_id in list(self._requests):
                self.cancel_request(request_id)
        threads.shutdown(wait=False)
        deadline = None if timeout is None else time.monotonic() + timeout
        while block and self._requests and (deadline is None or time.monotonic() < deadline):
            time.sleep(0.001)

    def join(self, stop_trigger_time: float, timeout: float | None = None) -> None:
        self.stop(timeout=timeout)

    def destroy(self) -> None:
        self.stop(hard_stop=True)

    @contextmanager
    def pause(self) -> Iterator[None]:
        """A block in which no pass begins: the model can be changed in place."""
        if not self.is_running():
            raise RuntimeError("The manager is not running, so it cannot be paused: call start().")
        with turns_of(self.model).held():
            yield

    # --- requests

    def add_request(
        self,
        input_ids: list[int],
        request_id: str | None = None,
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        eos_token_id: int | list[int] | None = None,
        **logit_processor_kwargs: Any,
    ) -> str:
        """Begin a request as soon as there is a row; its id. Keywords such as `temperature` are its
        own.
        """
        how = dict(logit_processor_kwargs)
        how["max_new_tokens"] = self._limit(input_ids, max_new_tokens)
        if eos_token_id is not None:
            how["eos_token_id"] = eos_token_id
        is_sampled = how.get("do_sample", self.generation_config.do_sample)
        with self._lock:
            if self._threads is None:
                raise RuntimeError("The manager is not running: call start() before add_request().")
            if request_id is None:
                request_id = f"req_{self._counter}"
                self._counter += 1
            earlier = self._requests.get(request_id)
            if earlier is not None and not earlier.is_cancelled:
                raise ValueError(
                    f"The request {request_id} has not ended: choose another request_id."
                )
            children = [f"{request_id}__child#{i}" for i in range(self.num_return_sequences - 1)]
            for own_id in (*children, request_id):
                times: list[float] | None = [] if record_timestamps else None
                # Here, not in its thread: in the order in which requests come.
                seed = self._new_seed() if is_sampled else None
                request = _Request(own_id, list(input_ids), how, streaming, times, seed)
                self._requests[own_id] = request
                self._threads.submit(self._run, request)
        return request_id

    def _new_seed(self) -> int:
        return int(torch.randint(1 << 62, (), generator=self._generator))

    def add_requests(
        self,
        inputs: list[list[int]],
        max_new_tokens: int | None = None,
        streaming: bool = False,
        record_timestamps: bool = False,
        **logit_processor_kwargs: Any,
    ) -> list[str]:
        how: dict[str, Any] = {"streaming": streaming, "record_timestamps": record_timestamps}
        how |= {"max_new_tokens": max_new_tokens, **logit_processor_kwargs}
        return [self.add_request(ids, **how) for ids in inputs]

    def _limit(self, input_ids: list[int], max_new_tokens: int | None) -> int:
        asked = max_new_tokens or self.generation_config.max_new_tokens
        if asked is not None:
            return asked
        config = self.model.config.get_text_config(decoder=True)
        return max(1, int(config.max_position_embeddings) - len(input_ids))

    def cancel_request(self, request_id: str) -> None:
        """End a request; nothing more is told of it."""
        with self._lock:
            if (request := self._requests.get(request_id)) is None:
                return
            request.is_cancelled = True
            self.output_router.result_handlers.pop(request_id, None)
        for loop in self._decoder.loops:
            loop.cancel(request)

    def _run(self, request: _Request) -> None:
        request.begun = time.perf_counter()
        owner = OWNER.set(request)
        try:
            if not request.is_cancelled:
                self._generate(request)
        except Cancelled:
            pass
        except BaseException as error:  # SystemExit of a criterion, too: the client waits
            self.deliver(request, "FAILED", str(error))
        finally:
            OWNER.reset(owner)
            with self._lock:
                if self._requests.get(request.request_id) is request:  # else another has this id
                    del self._requests[request.request_id]

    def _generate(self, request: _Request) -> None:
        ids = torch.tensor([request.prompt], device=self.model.device)
        config: Any = copy.copy(self._config)
        how = config.update(**request.how)
        if request.is_streamed or request.timestamps is not None:
            how["streamer"] = _Watch(self, request)
        mask = torch.ones_like(ids)
        output = self.model.generate(ids, attention_mask=mask, generation_config=config, **how)
        request.tokens = output[0, len(request.prompt) :].tolist()
        self.deliver(request, "FINISHED")

    # --- results

    def deliver(self, request: _Request, status: str, error: str | None = None) -> None:
        end = time.perf_counter() if status == "FINISHED" else -1
        times = request.timestamps
        result = self._parts.GenerationOutput(
            request_id=request.request_id,
            prompt_ids=request.prompt,
            generated_tokens=list(request.tokens),
            error=error,
            status=self._parts.RequestStatus[status],
            created_time=request.created,
            lifespan=(request.begun, end),
            timestamps=None if times is None else list(times),
        )
        with self._lock:
            if request.is_cancelled:
                return
            try:
                self.output_router.deliver(result)
            except RuntimeError:  # the event loop of its handler is closed
                self.output_router.result_handlers.pop(request.request_id, None)
                self.output_router.output_queue.put(result)

    def get_result(self, request_id: str | None = None, timeout: float | None = None) -> Any:
        """The next result, or None: there is none, or it is of another request."""
        results = self.output_router.output_queue
        if results.empty() and not self._requests:
            return None
        try:
            result = results.get(timeout=timeout)
        except queue.Empty:
            return None
        if request_id is not None and result.request_id != request_id:
            results.put(result)
            return None
        return result

    def __iter__(self) -> Iterator[Any]:
        while self._requests or not self.output_router.output_queue.empty():
            if (result := self.get_result(timeout=0.1)) is not None:
                yield result

    def request_id_iter(self, request_id: str) -> Iterator[Any]:
        while self._requests or not self.output_router.output_queue.empty():
            result = self.get_result(request_id, timeout=0.1)
            if result is not None:
                yield result
                if result.is_finished():
                    return

    def register_result_handler(self, request_id: str, callback: Callable[[Any], None]) -> None:
        """Call this in the running event loop with each result of a request, also with those that
        are there already: a server may register after `add_request`.
        """
        router = self.output_router
        loop = asyncio.get_running_loop()

        def call_and_forget(result: Any) -> None:
            callback(result)
            if result.is_finished():
                router.result_handlers.pop(request_id, None)

        with self._lock:
            router.result_handlers[request_id] = call_and_forget, loop
            for result in _take(router.output_queue, request_id):
                loop.call_soon(call_and_forget, result)


def _take(results: "queue.Queue[Any]", request_id: str) -> list[Any]:
    """Remove the results of a request from the queue."""
    with results.mutex:
        found = list(results.queue)
        results.queue.clear()
        results.queue.extend(result for result in found if result.request_id != request_id)
    return [result for result in found if result.request_id == request_id]


def _config_of_calls(config: GenerationConfig) -> GenerationConfig:
    """For calls of one sequence each. transformers' manager does not read the fields of caches and
    results: `transformers serve` asks for no cache, since a paged one is elsewhere.
    """
    config = copy.deepcopy(config)
    config.num_return_sequences = 1
    config.use_cache = True
    config.cache_implementation = None
    config.return_dict_in_generate = False
    if config.eos_token_id is None:
        config.eos_token_id = -1  # no end, as in transformers; None: that of the model
    if config.pad_token_id is None:
        config.pad_token_id = 0  # of one row: never used
    return config


def refusal(config: GenerationConfig, batching_config: Any) -> str | None:
    """Why transformers' own manager serves these requests; None: ours does."""
    if compat.continuous_batching() is None:
        return "this version of transformers has no continuous batching that is known"
    if getattr(batching_config, "return_logprobs", False):
        return "log probabilities are asked for"
    if (config.num_beams or 1) > 1:
        return "beams are asked for"
    return None
