"""One kernel in the place of a step's list.

    recorded    the list becomes a plan; the list serves, as a graph
    compiled    in a thread, from the end of the first call on
    ready       at the beginning of a later call the step is captured with the kernel and tried
    taken over  the kernel serves
    given up    the list serves for good, and `reason` says why

The graph of the list is kept: it serves long texts, and takes over again if a launch of the kernel
fails. Nothing here makes a step fail that its list could serve.
"""

from collections.abc import Callable
from weakref import WeakKeyDictionary

import torch
from transformers import PreTrainedModel

from hf_static_kv.cache import debug
from hf_static_kv.kernels.persistent_step import Plan
from hf_static_kv.kernels.persistent_step_cuda import Build, PersistentStep, refusal
from hf_static_kv.program.persistent import Unplanned, plan_of
from hf_static_kv.program.record import Program
from hf_static_kv.program.step import DecodeStep, Runs

# Hidden size, intermediate size and head dim of models whose kernel takes less time than the graph of
# their list, on an H200 (2026-11-19): Llama-3.2-1B 675 us instead of 791, Qwen3-1.7B 1,027 instead of
# 1,180, Gemma 3 1B 800 instead of 870, SmolLM2-135M 371 instead of 409. Llama-3.1-8B takes 4,023, its
# graph 3,864.
_FASTER = {(2048, 8192, 64), (2048, 6144, 128), (1152, 6912, 256), (576, 1536, 64)}
# With bitsandbytes' weights of four bits, through `generate`: Llama-3.1-8B 519 tokens/s instead of 375,
# Llama-3.2-1B 1,830 instead of 1,466. With weights of eight bits, and with torchao's tiles, no graph was
# measured beside it: alone the kernel takes 2,580 and 1,619 us for Llama-3.1-8B.
_FASTER_PACKED = {(4096, 14336, 128), (2048, 8192, 64)}
# Of the H200. An H100 SXM has as many; on an H100 PCIe, an H20 or a part of a GPU (MIG) a block has
# other shares of the weights, and nobody has measured it.
_MULTIPROCESSORS = 132
# From this length on the list serves: its attention is faster. One token of Llama-3.2-1B takes the graph
# and the kernel 792 and 690 us at 512 tokens, 821 and 786 at 4,096, 929 and 1,014 at 16,384, 1,763 and
# 2,946 at 130,000 (H200, 2026-11-19). Other models were measured at 512 tokens only; Qwen3-1.7B reads
# 3.5 times as many bytes of keys and values, and gains as little at 512.
MOST_TOKENS = 2048


def is_faster(plan: Plan) -> bool:
    """Whether the kernel was measured to take less time than the graph of the list."""
    if _multiprocessors(plan.token.device) != _MULTIPROCESSORS:
        return False
    packed = plan.packed
    if packed is not None and packed.layout in ("bytes", "tiles"):
        return False
    measured = _FASTER if packed is None else _FASTER_PACKED
    return tuple(plan.sizes[name] for name in ("H", "I", "D")) in measured


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


class Takeover:
    """What became of the kernel of one step."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason  # why the list serves; "": it does not, or not much longer
        self.plan: Plan | None = None  # until it is compiled
        self.build: Build | None = None  # until the kernel is tried
        self.kernel: PersistentStep | None = None  # that has taken over
        self.is_used = False  # and serves; else the list, as the text is long
        self.other: Runs | None = None  # of the two the one that does not serve

    def read(self, program: Program) -> None:
        """The plan of a list, or the reason why it has no kernel."""
        try:
            plan = plan_of(program)
            self.reason = refusal(plan)
            if not self.reason and not is_faster(plan):
                self.reason = "it was not measured to be faster"
            self.plan = None if self.reason else plan
        except Unplanned as unplanned:
            self.reason = str(unplanned)
        except Exception as error:  # the list would serve
            self._give_up(error)

    def compile(self) -> None:
        if self.plan is None:
            return
        try:
            self.build = Build(self.plan)
        except Exception as error:
            self._give_up(error)
        self.plan = None

    def try_kernel(self, step: DecodeStep, trial: Callable[[], None]) -> None:
        assert self.build is not None
        try:
            kernel = self.build.step()
            before = step.exchange(Runs(kernel, None, None, kernel.buffers, kernel.chunks))
            try:
                trial()
                if kernel.has_failed():
                    raise RuntimeError("a block has waited in vain")
            except BaseException:
                step.exchange(before)
                raise
        except Exception as error:
            self._give_up(error)
            return
        # Not after an interrupt: then a later call tries it again.
        self.build = None
        self.kernel = kernel
        self.is_used = True
        self.other = before._replace(buffers=kernel.buffers)

    def use(self, step: DecodeStep, is_used: bool) -> None:
        """Let the kernel serve, or the list."""
        if self.kernel is not None and is_used != self.is_used:
            assert self.other is not None
            self.other = step.exchange(self.other)
            self.is_used = is_used

    def drop_kernel(self, step: DecodeStep) -> None:
        self.use(step, False)
        self.kernel = self.other = None
        self.reason = "a block has waited in vain"

    def _give_up(self, error: Exception) -> None:
        debug.logger.debug("A kernel for the whole step is not used.", exc_info=True)
        first_line = next(iter(str(error).splitlines()), "")
        self.reason = f"{type(error).__name__}: {first_line}"
        self.build = None


# Of the steps of each model: a plan holds its weights, and a step may outlive the model.
_TAKEOVERS: WeakKeyDictionary[PreTrainedModel, WeakKeyDictionary[DecodeStep, Takeover]] = (
    WeakKeyDictionary()
)


def begin(step: DecodeStep, program: Program) -> None:
    """Note the kernel of a step that has been recorded as this list, if there is one."""
    takeover = _note(step, Takeover())
    takeover.read(program)
    debug.logger.debug("a kernel for the whole step: %s", takeover.reason or "will be compiled")


def refuse(step: DecodeStep, reason: str) -> None:
    """The step gets no kernel. One that it has stays, as does the reason why it has none."""
    takeover = takeover_of(step)
    if takeover is None or not (takeover.kernel or takeover.reason):
        _note(step, Takeover(reason))


def compile_kernel(step: DecodeStep) -> None:
    """In a thread, if there is one to be compiled. After a call: beside a first call it would take
    time of the interpreter.
    """
    if (takeover := takeover_of(step)) is not None:
        takeover.compile()


def _note(step: DecodeStep, takeover: Takeover) -> Takeover:
    _TAKEOVERS.setdefault(step.model, WeakKeyDictionary())[step] = takeover
    return takeover


def takeover_of(step: DecodeStep) -> Takeover | None:
    steps = _TAKEOVERS.get(step.model) if step.model is not None else None
    return None if steps is None else steps.get(step)


def choose_by_length(step: DecodeStep, length: int) -> int | None:
    """Let a kernel serve if the next token's text is short enough. The length from which on the list is
    to serve; None: it does.
    """
    takeover = takeover_of(step)
    if takeover is None or takeover.kernel is None:
        return None
    takeover.use(step, length < MOST_TOKENS)
    return MOST_TOKENS if takeover.is_used else None


def why_no_kernel(step: DecodeStep) -> str | None:
    """Why the list of a step serves; None: a kernel does."""
    takeover = takeover_of(step)
    if takeover is None:
        return "the step has no list"
    if takeover.kernel is not None:
        return None if takeover.is_used else f"the text has {MOST_TOKENS:,} tokens or more"
    return takeover.reason or "it is compiled, and begins in a later call"


def is_ready(step: DecodeStep, length: int) -> bool:
    """Whether a kernel waits to be tried, which would serve a text of this length."""
    takeover = takeover_of(step)
    if takeover is None or takeover.build is None or length >= MOST_TOKENS:
        return False
    return takeover.build.is_ready


def wait_for(step: DecodeStep) -> None:
    """Until the kernel of a step is compiled, if it has one."""
    takeover = takeover_of(step)
    if takeover is not None and takeover.build is not None:
        takeover.build.wait()


def take_over(step: DecodeStep, trial: Callable[[], None]) -> None:
    """Put the kernel in the place of the list. If `trial`, which captures the step and verifies it,
    raises, then the list stays and the reason is kept.
    """
    takeover = takeover_of(step)
    assert takeover is not None
    takeover.try_kernel(step, trial)


def give_up_if_failed(step: DecodeStep) -> bool:
    """Whether a launch of the kernel has failed: from then on the list serves.

    Waits for the device if a kernel serves.
    """
    takeover = takeover_of(step)
    if takeover is None or takeover.kernel is None or not takeover.is_used:
        return False
    if not takeover.kernel.has_failed():
        return False
    takeover.drop_kernel(step)
    return True
