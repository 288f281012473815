"""One kernel in the place of a step's list.

    recorded    the list becomes a plan, and a thread compiles its kernel; the list serves, as a graph
    ready       at the beginning of a later call the step is captured with the kernel and tried
    taken over  the kernel serves
    given up    the list serves for good, and `reason` says why

The graph of the list is kept: it takes over again if a launch of the kernel fails.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

from transformers import PreTrainedModel

from hf_static_kv.cache import debug
from hf_static_kv.kernels.persistent_step import Plan
from hf_static_kv.kernels.persistent_step_cuda import Build, PersistentStep, refusal
from hf_static_kv.program.persistent import Unplanned, plan_of
from hf_static_kv.program.record import Program
from hf_static_kv.program.step import DecodeStep, Runs

# Hidden size, intermediate size and head dim of models whose kernel takes less time than the graph of
# their list, on an H200 (2026-11-19): Llama-3.2-1B 690 us instead of 783, Qwen3-1.7B 1,069 instead of
# 1,171, SmolLM2-135M 347 instead of 410. Llama-3.1-8B took 4,047 instead of 3,864, Gemma 3 1B
# 1,264 instead of 872.
_FASTER = {(2048, 8192, 64), (2048, 6144, 128), (576, 1536, 64)}
# With bitsandbytes' weights of four bits, through `generate`: Llama-3.1-8B 470 tokens/s instead of 376,
# Llama-3.2-1B 1,830 instead of 1,466. With weights of eight bits, and with torchao's tiles, no graph was
# measured beside it.
_FASTER_PACKED = {(4096, 14336, 128), (2048, 8192, 64)}


def is_faster(plan: Plan) -> bool:
    """Whether the kernel takes less time than the graph of the list."""
    packed = plan.packed
    if packed is not None and packed.layout in ("bytes", "tiles"):
        return False
    measured = _FASTER if packed is None else _FASTER_PACKED
    return tuple(plan.sizes[name] for name in ("H", "I", "D")) in measured


class Takeover:
    """What became of the kernel of one step."""

    def __init__(self, program: Program) -> None:
        self.reason = ""  # why the list serves; "": it does not, or not much longer
        self.build: Build | None = None  # until the kernel is tried
        self.kernel: PersistentStep | None = None  # that serves
        self.list: Runs | None = None  # that has served
        try:
            plan = plan_of(program)
        except Unplanned as unplanned:
            self.reason = str(unplanned)
            return
        self.reason = refusal(plan) or ("" if is_faster(plan) else "the list is faster")
        if not self.reason:
            self.build = Build(plan)


# Of the steps of each model: a plan holds its weights, and a step may outlive the model.
_TAKEOVERS: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[DecodeStep, Takeover]] = (
    WeakKeyDictionary()
)


def begin(step: DecodeStep, program: Program) -> None:
    """Compile the kernel of a step that has been recorded as this list, if there is one."""
    takeover = Takeover(program)
    _TAKEOVERS.setdefault(step.model, WeakKeyDictionary())[step] = takeover
    debug.logger.debug("a kernel for the whole step: %s", takeover.reason or "is compiled")


def takeover_of(step: DecodeStep) -> Takeover | None:
    steps = _TAKEOVERS.get(step.model) if step.model is not None else None
    return None if steps is None else steps.get(step)


def is_ready(step: DecodeStep) -> bool:
    """Whether a kernel waits to be tried."""
    takeover = takeover_of(step)
    return takeover is not None and takeover.build is not None and takeover.build.is_ready


def take_over(step: DecodeStep, trial: Callable[[], None]) -> None:
    """Put the kernel in the place of the list. If `trial`, which captures the step and verifies it,
    raises, then the list stays and the reason is kept.
    """
    takeover = takeover_of(step)
    assert takeover is not None
    assert takeover.build is not None
    build = takeover.build
    takeover.build = None
    try:
        kernel = build.step()
        before = step.exchange(Runs(kernel, None, None, kernel.buffers))
        try:
            trial()
            if kernel.has_failed():
                raise RuntimeError("a block has waited in vain")
        except BaseException:
            step.exchange(before)
            raise
    except Exception as error:
        debug.logger.debug("A kernel for the whole step is not used.", exc_info=True)
        first_line = next(iter(str(error).splitlines()), "")
        takeover.reason = f"{type(error).__name__}: {first_line}"
        return
    takeover.kernel = kernel
    takeover.list = before


def give_up_if_failed(step: DecodeStep) -> bool:
    """Whether a launch of the kernel has failed: from then on the list serves.

    Waits for the device if a kernel serves.
    """
    takeover = takeover_of(step)
    if takeover is None or takeover.kernel is None or not takeover.kernel.has_failed():
        return False
    assert takeover.list is not None
    step.exchange(takeover.list)
    takeover.kernel = None
    takeover.list = None
    takeover.reason = "a block has waited in vain"
    return True
