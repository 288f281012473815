"""One decode step with every input at a fixed address, so that a CUDA graph can hold it.

    token -> model -> logits                 in between, each layer writes its keys and values straight into the storage
    slot, positions, spans   count on by themselves: nothing on the host changes from step to step

On a CPU the same step runs without a graph.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from threading import Lock, get_ident
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_static_kv.cache import StaticContiguousCache
from hf_static_kv.fusion.linears import fused_linears
from hf_static_kv.fusion.norms import FusedSums, fused_norms
from hf_static_kv.fusion.positions import angles_from_tables, fused_rotary
from hf_static_kv.kernels.advance import advance
from hf_static_kv.kernels.greedy import GreedyState, select_greedy
from hf_static_kv.kernels.write_token import write_token
from hf_static_kv.loading import wait_for_inductor, wait_for_triton
from hf_static_kv.storage import StorageGroup

_WARM_UPS = 2
_CAPTURING = Lock()  # sync-debug mode and graph capture are process-wide: one capture at a time
_SYNC_WARNING = "called a synchronizing CUDA operation"
_MAX_COMPILED = 256  # steps times kinds of layers in one process; dynamo's own limit of 8 would silently end compiling


class DecodeStep:
    """One new token for each row: `begin` says where the text ends, every `run` appends a token and gives its logits.

    Holds the cache's storage and not the cache, whose lengths the caller moves.
    """

    def __init__(self, model: PreTrainedModel, cache: StaticContiguousCache, batch_size: int) -> None:
        if len(cache.storage_groups) > 1:
            raise ValueError(f"The layers are of {len(cache.storage_groups)} unlike shapes: a step takes one.")
        self.batch_size, self.max_cache_len = batch_size, cache.max_cache_len
        self._model = weakref.ref(model)  # a graph does not need it, and a decoder may outlive it
        device, num_layers = cache.layers[0].device, len(cache.layers)
        whole = torch.iinfo(torch.int64).max // 2
        self.windows = torch.tensor([layer.sliding_window or whole for layer in cache.layers], device=device)  # [L]
        self.token = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.origin = torch.zeros(batch_size, 1, dtype=torch.int64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)  # the last position that was written
        self.positions = torch.zeros_like(self.origin)
        # Padded to four columns so that the spans of every layer are 32-byte aligned and Triton compiles one variant.
        self.padded_spans = torch.zeros(batch_size, num_layers, 4, dtype=torch.int64, device=device)
        self.spans = self.padded_spans[..., :3]
        self.cache = _StepCache(cache.storage_groups[0], self.slot)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: torch.Tensor | None = None
        self._around_a_pass: AbstractContextManager[object] = nullcontext()
        self._tables: list[torch.Tensor] = []  # which the graph reads

    @property
    def model(self) -> PreTrainedModel:
        model = self._model()
        if model is None:
            raise RuntimeError("The model of this step is gone.")
        return model

    @property
    def is_orphan(self) -> bool:
        """Whether the model is gone, so that no call can want this step."""
        return self._model() is None

    @property
    def kept(self) -> list[torch.Tensor]:
        """What the step holds beside the model and the cache."""
        own = [value for value in self.__dict__.values() if isinstance(value, torch.Tensor)]
        return [*own, *self._tables]

    def begin(self, length: int, origin: torch.Tensor) -> None:
        """The next token comes to position `length`; the text of row b begins at `origin[b]`."""
        if length >= self.max_cache_len:
            raise ValueError(f"The cache is full: it holds {length} of {self.max_cache_len} tokens.")
        self.slot.fill_(length - 1)
        self.origin.copy_(origin[:, None])

    def run(self, tokens: torch.Tensor) -> torch.Tensor:
        """Append `tokens` [B] and give the logits [B, V] of what follows, in float32."""
        self.token.copy_(tokens[:, None])
        if self.graph is None:
            self.logits = self._forward()
        else:
            self.graph.replay()
        assert self.logits is not None
        return self.logits.to(torch.float32, copy=True)  # the next run writes over its own

    def capture(self, length: int, origin: torch.Tensor, compile: str = "none") -> None:
        """Record the step as a graph, compiled or not. Writes at position `length`, which the first `run` writes again.

        What is compiled stays in the graph alone: the model's own `forward` is back when this returns.
        """
        wait_for_triton()
        from hf_static_kv.kernels.launch_triton import compile_only

        with _CAPTURING, torch.cuda.device(self.slot.device), ExitStack() as changes:
            if compile == "none":  # a compiler fuses these itself
                changes.enter_context(fused_norms(self.model))
                changes.enter_context(fused_rotary(self.model))
                self._around_a_pass = FusedSums()
            with compile_only():  # all kernels at once, where passes would meet one after the other
                changes.enter_context(fused_linears(self.model, run=lambda: self._run_once(length, origin)))
                self._run_once(length, origin)
            # Only now: a table is filled by kernels that run, inside `exact` by ours.
            self._tables = changes.enter_context(angles_from_tables(self.model, self.max_cache_len))
            if compile == "layers":
                wait_for_inductor()
            changes.enter_context(compiled(self.model, compile, num_layers=self.spans.shape[1]))
            self._capture(length, origin)

    def _run_once(self, length: int, origin: torch.Tensor) -> None:
        self.begin(length, origin)
        self._forward()

    def _capture(self, length: int, origin: torch.Tensor) -> None:
        self._warm_up(length, origin)
        self.begin(length, origin)
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on
                self.logits = self._forward()
        except BaseException:
            torch.cuda.set_stream(stream)  # a capture that fails leaves its own stream behind
            raise
        self.graph = graph
        self._around_a_pass = nullcontext()  # it holds norms of the model

    def _warm_up(self, length: int, origin: torch.Tensor) -> None:
        """Runs before the capture: they compile the kernels and let libraries allocate what they need.

        In the last one any wait for the device is an error. In a capture it would be one too, and one that leaves the
        allocator unusable for the rest of the process.
        """
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for i in range(_WARM_UPS):
                with _synchronizing_is_an_error() if i == _WARM_UPS - 1 else nullcontext():
                    self._run_once(length, origin)
        torch.cuda.current_stream().wait_stream(stream)

    def _forward(self) -> torch.Tensor:
        with self._around_a_pass:
            return self._count_on_and_run()

    def _count_on_and_run(self) -> torch.Tensor:
        advance(self.slot, self.origin, self.windows, self.spans, self.positions)
        output = self.model(
            input_ids=self.token,
            position_ids=self.positions,
            attention_mask=self.padded_spans.view(self.batch_size, -1, 1, 1),
            past_key_values=self.cache,
            use_cache=True,
        )
        logits: torch.Tensor = output.logits[:, -1]
        return logits


class GreedyStep(DecodeStep):
    """A decode step that chooses as well: the likeliest token, or padding in a row that has ended.

    Nothing but the replay stands between one token and the next.
    """

    MAX_EOS = 16

    def __init__(self, model: PreTrainedModel, cache: StaticContiguousCache, batch_size: int) -> None:
        super().__init__(model, cache, batch_size)
        device = self.slot.device
        # By position. The last token of a text is chosen and not written into the cache: one place more.
        self.state = GreedyState(
            sequences=torch.zeros(batch_size, cache.max_cache_len + 1, dtype=torch.int64, device=device),
            token=self.token,
            unfinished=torch.ones(batch_size, 1, dtype=torch.bool, device=device),
            eos=torch.full((1, self.MAX_EOS), -1, device=device),
            pad=torch.zeros(1, dtype=torch.int64, device=device),
            is_over=torch.zeros((), dtype=torch.bool, device=device),
        )

    @property
    def kept(self) -> list[torch.Tensor]:
        return [*super().kept, *self.state]

    def start(
        self, tokens: torch.Tensor, unfinished: torch.Tensor, eos: torch.Tensor | None, pad: torch.Tensor | None
    ) -> None:
        """The run's state after its first tokens [B]: which rows go on [B], what ends one, what follows its end."""
        self.token.copy_(tokens[:, None])
        self.state.unfinished.copy_(unfinished[:, None])
        self.state.eos.fill_(-1)
        if eos is not None:
            self.state.eos[0, : len(eos)].copy_(eos)
        if pad is not None:
            self.state.pad.copy_(pad.reshape(1))

    def run_on(self) -> torch.Tensor:
        """Append the tokens that were chosen last and choose the next; whether all rows have ended, on the device."""
        if self.graph is None:
            self._forward()
        else:
            self.graph.replay()
        return self.state.is_over

    def _count_on_and_run(self) -> torch.Tensor:
        logits = super()._count_on_and_run()
        select_greedy(logits, self.slot, self.state)
        return logits


COMPILE = ("none", "layers")


@contextmanager
def compiled(model: PreTrainedModel, what: str, num_layers: int, **options: Any) -> Iterator[None]:
    """The model with its decoder layers compiled, and afterwards with its own `forward` again.

    Layers of one kind share one compilation: a matter of seconds, where the whole model takes a minute.
    """
    parts = _decoder_layers(model, num_layers) if what == "layers" else []
    before = [part.__dict__.get("forward") for part in parts]  # hooks of accelerate stand here
    for part in parts:
        part.forward = torch.compile(part.forward, dynamic=False, **(options or _inductor_options()))
    limits: dict[str, Any] = {"recompile_limit": _MAX_COMPILED, "accumulated_recompile_limit": _MAX_COMPILED}
    try:
        with torch._dynamo.config.patch({"fail_on_recompile_limit_hit": True, **limits}) if parts else nullcontext():
            yield
    finally:
        for part, own in zip(parts, before, strict=True):
            del part.forward
            if own is not None:
                part.forward = own


def _inductor_options() -> dict[str, Any]:
    """Kernels that begin early, as ours do, where this version of torch can make them."""
    knows = hasattr(torch._inductor.config.triton, "enable_pdl")
    return {"options": {"triton.enable_pdl": True}} if knows else {}


def _decoder_layers(model: PreTrainedModel, num_layers: int) -> list[torch.nn.Module]:
    """Those that write into the cache: as many as it has, each with a number. A vision tower may be as deep."""
    lists = (module for module in model.modules() if isinstance(module, torch.nn.ModuleList))
    for layers in lists:
        if len(layers) == num_layers and all(_is_numbered(layer) for layer in layers):
            return list(layers)
    raise ValueError(f"no list of {num_layers} decoder layers was found in {type(model).__name__} to compile")


def _is_numbered(layer: torch.nn.Module) -> bool:
    return any(getattr(module, "layer_idx", None) is not None for module in layer.modules())


@contextmanager
def _synchronizing_is_an_error() -> Iterator[None]:
    """A pass of this thread that waits for the device raises at its end. Other threads may wait.

    Torch's mode is one for the whole process, so it only warns, and the warnings of other threads are dropped.
    """
    before, own_thread, show, seen = torch.cuda.get_sync_debug_mode(), get_ident(), warnings.showwarning, []

    def note(message: Warning | str, *args: Any, **kwargs: Any) -> None:
        if not str(message).startswith(_SYNC_WARNING):
            show(message, *args, **kwargs)
        elif get_ident() == own_thread:
            seen.append(str(message))

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        warnings.filterwarnings("always", message=_SYNC_WARNING)
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)
    if seen:
        raise RuntimeError("a pass waits for the device: it called a synchronizing CUDA operation")


class _StepCache(Cache):
    """The storage as a model sees it in a step: written at a position that is read on the device, returned whole.

    A graph must not hold a length, so it has none to tell. Whatever a model computes from the zero is wrong at every
    step, and so it is seen when the captured step is compared with an ordinary one.
    """

    def __init__(self, group: StorageGroup, slot: torch.Tensor) -> None:
        super().__init__(layers=[])
        self.keys, self.values, self.slot = group.keys, group.values, slot

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        batch = len(key_states)
        keys, values = self.keys[layer_idx, :batch], self.values[layer_idx, :batch]
        write_token(keys, values, key_states, value_states, self.slot)
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.keys.shape[3], 0
