"""One pass over the new tokens of each batch row, with every input at a fixed address.

record     a pass of the model is written down as a list of operations (record.py)
rewrite    operations that belong together become one (rules.py)
capture    the list becomes a CUDA graph; on a CPU the list runs as it is

tokens -> list -> logits      each layer writes its keys and values straight into the storage

Positions advance on the device (positions.py): the host changes nothing from step to step. It only
compacts layers, about once in a window, and then tells the step where slot 0 is (`sync_offsets`).
"""

import warnings
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from inspect import signature
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from hf_static_kv.attention import StepLayer
from hf_static_kv.cache.cache import StaticContiguousCache
from hf_static_kv.cache.layout import plan_layers
from hf_static_kv.cache.request import cache_is_full
from hf_static_kv.cache.storage import CAPTURING
from hf_static_kv.cache.values import unwrapped
from hf_static_kv.kernels.positions import write_tokens
from hf_static_kv.patching import attention_implementation, pass_context, replaced
from hf_static_kv.program.activations import named_activations
from hf_static_kv.program.experts import one_operation_experts, one_operation_routers
from hf_static_kv.program.norms import fused_norms
from hf_static_kv.program.positions import Positions
from hf_static_kv.program.preload import TRITON, wait_for
from hf_static_kv.program.quantised import one_operation_quantised, rounds_inputs
from hf_static_kv.program.record import Program, Recorder, leaves
from hf_static_kv.program.rotary import fused_rotary, lookup, one_operation_angles
from hf_static_kv.program.rules import rewrite
from hf_static_kv.program.shadow import shadow_of

# The programs of each model, which hold its weights: a step may outlive the model.
_PROGRAMS: WeakKeyDictionary[
    PreTrainedModel, WeakKeyDictionary["DecodeStep", Callable[[], Tensor]]
] = WeakKeyDictionary()
# The shadows of which a graph was captured without a program: it reads what passes have left on
# their modules.
_SHADOWS: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary["DecodeStep", PreTrainedModel]] = (
    WeakKeyDictionary()
)
# The tensors that a step reads, with their addresses.
_READ: WeakKeyDictionary[
    PreTrainedModel, WeakKeyDictionary["DecodeStep", tuple[list[Tensor], list[int]]]
] = WeakKeyDictionary()
_SYNC_WARNING = "called a synchronizing CUDA operation"


class Runs(NamedTuple):
    """What a step runs."""

    program: Callable[[], Tensor]
    graph: torch.cuda.CUDAGraph | None  # of the program
    logits: Tensor | None  # of the graph
    buffers: list[Tensor]  # of the program, if it is a kernel
    chunks: tuple[Tensor, Tensor] | None = None  # of the logits, if it finds their largest


class DecodeStep:
    """Up to `num_tokens` new tokens for each batch row.

    `set_position` says where; every `run` appends tokens and gives the logits of the last. Holds
    the cache's storage and not the cache, whose length the caller moves.

    Args:
        parts: the leading dims of `position_ids` if a position has several parts, as [3] for
            [3, B, 1].
        settings: further keywords of the model.
        computes_ids: False: `set_tokens` is given the position ids.
        beside: another step over the same rows: both move the same lengths.
    """

    gives_all_logits = False  # [B, q, V]; else [B, V], of the last token
    rows_differ = False  # in their lengths, or some take no part

    def __init__(
        self,
        model: PreTrainedModel,
        cache: StaticContiguousCache,
        batch_size: int,
        parts: Sequence[int] = (),
        settings: Mapping[str, Any] | None = None,
        num_tokens: int = 1,
        computes_ids: bool = True,
        beside: "DecodeStep | None" = None,
    ) -> None:
        self.max_cache_len = cache.max_cache_len
        # A graph needs neither model nor cache, and a decoder may outlive them. A cache that grows
        # replaces its groups.
        self._model = weakref.ref(model)
        self._cache = weakref.ref(cache)
        self._groups = [weakref.ref(group) for group in cache.storage_groups]
        device = cache.storage_groups[0].keys.device
        self.positions: Positions = Positions(
            windows=[layer.sliding_window for layer in cache.kv_layers],
            are_chunked=[plan.is_chunked for plan in plan_layers(model.config) if plan.has_keys],
            compact_windows=list(cache.offsets),
            batch_size=batch_size,
            num_tokens=num_tokens,
            parts=parts,
            device=device,
            computes_ids=computes_ids,
            shared=None if beside is None else beside.positions,
        )
        self.token = torch.zeros(batch_size, num_tokens, dtype=torch.int64, device=device)
        # A mask of one key keeps the model from making one.
        self.mask = torch.ones(batch_size, 1, 1, 1, dtype=torch.bool, device=device)
        self.layers = self._step_layers(cache)
        has_one_length = batch_size == 1 or not self.rows_differ
        self.cache = _StepCache(cache, self.layers, self.positions, has_one_length)
        self.layers |= _sharing_layers(model, self.layers)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None
        self._tables: list[Tensor] = []  # which the program reads
        self._buffers: list[Tensor] = []  # of a kernel in the place of the list
        self._chunks: tuple[Tensor, Tensor] | None = None  # of its logits, for `select_greedy`
        self._settings = dict(settings or {})
        self._shadow: PreTrainedModel | None = None
        # A package rounds the inputs of a layer to eight bits, and the list does not.
        self.rounds_fewer_inputs = False

    def _step_layers(self, cache: StaticContiguousCache) -> dict[int, StepLayer]:
        keyed = [i for i, layer in enumerate(cache.layers) if layer in cache.kv_layers]
        layers = {}
        for n, (i, layer) in enumerate(zip(keyed, cache.kv_layers, strict=True)):
            cursor = self.positions.cursor(layer.sliding_window if layer.is_compact else None)
            layers[i] = StepLayer(i, cursor.offset, cursor.slots, cursor.spans[:, n])
        return layers

    @property
    def is_orphan(self) -> bool:
        """Whether the model or the storage no longer exists, so that no call can use this step."""
        return self._model() is None or any(group() is None for group in self._groups)

    @property
    def model(self) -> Any:
        """The model; None where it no longer exists."""
        return self._model()

    @property
    def buffers(self) -> list[Tensor]:
        """The tensors that the step holds beside the model and the cache."""
        own = [value for value in vars(self).values() if isinstance(value, Tensor)]
        return own + self.positions.tensors + self._tables + self._buffers

    @property
    def is_recorded(self) -> bool:
        """Whether it runs a program, not the model itself."""
        return self in _PROGRAMS.get(self.model, ())

    @property
    def is_in_place(self) -> bool:
        """Whether the memory that a replay reads is still that of the tensors that were there."""
        if self.is_orphan:
            return False
        read = _READ.get(self.model)
        tensors, addresses = ([], []) if read is None or self not in read else read[self]
        return list(map(Tensor.data_ptr, tensors)) == addresses

    @property
    def runs_model(self) -> bool:
        """Whether a run is a pass of the model itself, neither a graph nor a program."""
        return self.graph is None and not self.is_recorded

    @contextmanager
    def on_shadow(self, attention: str | None = None) -> Iterator[Any]:
        """Passes inside run on one shadow of the model, which is yielded: other threads run the
        model meanwhile.

        It has this attention implementation, or that of the model.
        """
        if self._shadow is not None:
            yield self._shadow
            return
        self._shadow = shadow = shadow_of(self.model)
        try:
            with attention_implementation(shadow, attention) if attention else nullcontext():
                yield shadow
        finally:
            self._shadow = None

    def set_position(
        self, lengths: int | Tensor, seq_start: Tensor, position_ids: Tensor | None = None
    ) -> None:
        """The next token of row b goes to `lengths[b]`, and its sequence begins at `seq_start[b]`.

        The model is told that its position is `position_ids` [..., B, 1], by default the distance
        from the beginning.
        """
        if isinstance(lengths, int) and lengths >= self.max_cache_len:
            raise cache_is_full(lengths, self.max_cache_len)
        self.positions.set(lengths, seq_start, position_ids)
        self.sync_offsets()

    def sync_offsets(self) -> None:
        """Follow the cache after it has compacted layers."""
        if (cache := self._cache()) is not None:
            self.positions.set_offsets(cache.offsets)

    def run(self, tokens: Tensor, position_ids: Tensor | None = None) -> Tensor:
        """Append `tokens` [B] or [B, n] and return the logits [B, V] of the next, in float32."""
        self.set_tokens(tokens, position_ids)
        # A copy: the next run overwrites the logits.
        return self._replay_or_forward().to(torch.float32, copy=True)

    def set_tokens(self, tokens: Tensor, position_ids: Tensor | None = None) -> None:
        """The next pass has these tokens [B] or [B, n], at most `num_tokens` of a row."""
        tokens = tokens.reshape(len(tokens), -1)
        count = tokens.shape[1]
        self.token[:, -count:].copy_(tokens)
        if self.token.shape[1] > 1:
            self.positions.counts.fill_(count)
        if position_ids is not None:
            self.positions.position_ids[..., :-count] = position_ids[..., :1]  # of padding
            self.positions.position_ids[..., -count:] = position_ids

    def advance(self) -> None:
        """Run the pass over what stands in its inputs."""
        self._replay_or_forward()

    def _replay_or_forward(self) -> Tensor:
        if self.graph is None or self.logits is None:
            return self._forward()
        self.graph.replay()
        return self.logits

    def record(
        self,
        length: int,
        seq_start: Tensor,
        position_ids: Tensor | None = None,
        token: Tensor | None = None,
        *,
        is_exact: bool = False,
        without: Collection[str] = (),
    ) -> Program:
        """Write down the pass and rewrite it, so that steps no longer need the model; `without`
        names rules to skip.

        What the pass computes outside of torch's operations stays as it is now. So that
        verification sees it, record with a `token` [B, n] and at `position_ids` that verification
        does not use.
        """
        self.set_position(length, seq_start, position_ids)
        if token is not None:
            self.set_tokens(token)
        # A kernel would be compiled here, before the parallel compilation.
        self.positions.place(by_kernel=False)
        with self.on_shadow() as model, ExitStack() as changes:
            if not is_exact and changes.enter_context(one_operation_experts(model)):
                # A router whose launches are skipped gives no valid index to other operations.
                changes.enter_context(one_operation_routers(model))
            if not is_exact and "packed_weights" not in without:
                packed = changes.enter_context(one_operation_quantised(model, self.token.numel()))
                self.rounds_fewer_inputs = any(map(rounds_inputs, packed))
            changes.enter_context(fused_rotary(model, only_here=True))
            for change in (fused_norms, one_operation_angles, named_activations):
                changes.enter_context(change(model))
            if self.token.is_cuda:
                from hf_static_kv.kernels.launch_triton import skipped_launches

                changes.enter_context(skipped_launches())
            with Recorder() as recorder:
                logits = self._pass_of_model()
        program: Program = recorder.program(logits)
        program.num_positions = self.max_cache_len
        with pass_context(self.model):
            rewrite(program, without, keeps_bits=is_exact)
        self._tables = [call.args[1] for call in program.calls_of(lookup)]
        _PROGRAMS.setdefault(self.model, WeakKeyDictionary())[self] = program.compiled()
        self._note_tensors(leaf for call in program for leaf in leaves((call.args, call.kwargs)))
        return program

    def exchange(self, runs: Runs) -> Runs:
        """Run another program on the same tensors; what was run before."""
        programs = _PROGRAMS[self.model]
        before = Runs(programs[self], self.graph, self.logits, self._buffers, self._chunks)
        programs[self], self.graph, self.logits, self._buffers, self._chunks = runs
        return before

    def capture(
        self,
        length: int,
        seq_start: Tensor,
        position_ids: Tensor | None = None,
        pool: Any = None,
    ) -> None:
        """Capture the step as a graph. The first `run` overwrites position `length`.

        Graphs of one memory `pool` must not run at the same time.
        """
        wait_for(TRITON)
        from hf_static_kv.kernels.launch_triton import compile_only

        at = length, seq_start, position_ids
        with self.on_shadow() as shadow, CAPTURING, torch.cuda.device(self.token.device):
            with compile_only():  # in parallel: ordinary passes compile one kernel after the other
                self._run_once(*at)
            self._warm_up(*at)
            self.set_position(*at)
            # `stream`: a failed capture leaves its own one current. "thread_local": other threads
            # may use the device.
            graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.stream(torch.cuda.current_stream())
            with stream, torch.cuda.graph(graph, pool, capture_error_mode="thread_local"):
                self.logits = self._forward()
            self.graph = graph
            if not self.is_recorded:
                _SHADOWS.setdefault(self.model, WeakKeyDictionary())[self] = shadow
                self._note_tensors((*shadow.parameters(), *shadow.buffers()))

    def _note_tensors(self, values: Iterable[Any]) -> None:
        parts = (part for value in values if isinstance(value, Tensor) for part in unwrapped(value))
        tensors = list({id(part): part for part in parts}.values())
        read = tensors, list(map(Tensor.data_ptr, tensors))
        _READ.setdefault(self.model, WeakKeyDictionary())[self] = read

    def _run_once(self, *at: Any) -> None:
        self.set_position(*at)
        self._forward()

    def _warm_up(self, *at: Any) -> None:
        """Two passes before the capture: they compile kernels and let libraries allocate."""
        stream = side_stream(self.token.device)
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                self._run_once(*at)
                # A synchronization in a capture leaves the allocator unusable for the process.
                with _no_synchronization():
                    self._run_once(*at)
        finally:
            # A failed step is freed, and what runs next gets the memory that its kernels write.
            torch.cuda.current_stream().wait_stream(stream)

    def _forward(self) -> Tensor:
        """Place the tokens and compute the logits, by the program if there is one."""
        self.positions.place()
        programs = _PROGRAMS.get(self.model)
        program = None if programs is None else programs.get(self)
        if program is None:
            return self._pass_of_model()
        with pass_context(self.model):
            return program()

    def _pass_of_model(self) -> Tensor:
        self.cache.written.clear()
        inputs: dict[str, Any] = {
            "input_ids": self.token,
            "position_ids": self.positions.position_ids,
            "attention_mask": self.mask,
        }
        with self.on_shadow() as model, replaced("layer_idx", self._layers_of(model)):
            if self.token.shape[1] > 1 and not self.gives_all_logits:
                inputs |= last_logits_only(model)
            outputs = model(**inputs, past_key_values=self.cache, use_cache=True, **self._settings)
        logits: Tensor = outputs.logits
        return logits if self.gives_all_logits else logits[:, -1]

    def _layers_of(self, model: PreTrainedModel) -> dict[Module, StepLayer]:
        # A module of another part, such as a vision tower, may have an index that no layer of the
        # cache has.
        indices = ((module, getattr(module, "layer_idx", None)) for module in model.modules())
        return {
            module: self.layers[i]
            for module, i in indices
            if isinstance(i, int) and i in self.layers
        }


def last_logits_only(model: Any) -> dict[str, int]:
    """The keyword with which a model gives the logits of the last token alone; none if it has none.

    Those of a long prompt are larger than all else in a pass.
    """
    takes_it = "logits_to_keep" in signature(model.forward).parameters
    return {"logits_to_keep": 1} if takes_it else {}


def _sharing_layers(
    model: PreTrainedModel, stored: Mapping[int, StepLayer]
) -> dict[int, StepLayer]:
    """Layers that store no keys, each with the last layer of its type that does: it reads those
    (Gemma 3n).
    """
    config = model.config.get_text_config(decoder=True)
    types = getattr(config, "layer_types", None) or ()
    num_shared = getattr(config, "num_kv_shared_layers", None) or 0
    first = len(types) - num_shared
    last = {layer_type: stored[i] for i, layer_type in enumerate(types[:first]) if i in stored}
    return {
        i: last[layer_type]
        for i, layer_type in enumerate(types)
        if i >= first and layer_type in last
    }


@cache
def side_stream(device: torch.device) -> torch.cuda.Stream:
    """The one beside the stream of the user: torch keeps a cuBLAS workspace of up to 32 MiB for each
    stream that was ever used.
    """
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@contextmanager
def _no_synchronization() -> Iterator[None]:
    """Raise at the end if this thread has synchronized.

    Torch's mode is process-wide, so other threads are ignored.
    """
    before = torch.cuda.get_sync_debug_mode()
    own_thread = get_ident()
    show = warnings.showwarning
    seen = []

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
        raise RuntimeError(
            "a pass synchronizes with the device: it called a synchronizing CUDA operation"
        )


class _StepCache(Cache):
    """The storage as a model sees it in a step: written at slots that are read on the device, and
    returned whole.

    Recurrent states are those of the cache, which change in place. The length is a tensor on the
    device: Python that branches on it would branch alike in every replay, and a recording refuses
    to read it. If rows have several lengths, no layer may ask for it. What else asks is told the
    longest: verification sees if that matters.
    """

    def __init__(
        self,
        cache: StaticContiguousCache,
        stored: Iterable[int],
        positions: Positions,
        has_one_length: bool,
    ) -> None:
        super().__init__(layers=list(cache.layers) if cache.stateful_layers else [])
        self.positions = positions
        self.written: set[int] = set()  # the layers that have the new tokens
        self.capacity = cache.max_cache_len
        self.has_one_length = has_one_length
        # Keys and values [B, H, S, D] by layer.
        self.storage = {
            i: [states[: len(positions.lengths)] for states in cache.layers[i].storage]
            for i in stored
        }

    def update(  # type: ignore[override]  # a StepLayer: see DecodeStep._pass_of_model
        self,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: StepLayer,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        if not isinstance(layer_idx, StepLayer):
            raise ValueError(
                f"layer {layer_idx} has no attention of its own: it uses that of another layer"
            )
        keys, values = self.storage[layer_idx.index]
        write_tokens(keys, values, key_states, value_states, layer_idx.slots)
        self.written.add(layer_idx.index)
        return keys, values

    def get_seq_length(self, layer_idx: int | StepLayer = 0) -> Any:
        if not self.has_one_length and isinstance(layer_idx, StepLayer):
            raise RuntimeError("a layer asks for the length of the cache, and rows have several")
        if not self.has_one_length:
            return torch.full_like(self.positions.counts[:1], self.capacity - 1)
        end = self.positions.full.slots[0, -1:] + 1  # [1]
        return end if int(layer_idx) in self.written else end - self.positions.counts[:1]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.capacity, 0
