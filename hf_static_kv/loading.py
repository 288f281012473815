"""For programs that load their models themselves: an evaluation harness, a server."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any
from weakref import WeakSet

from transformers import PreTrainedModel

from hf_static_kv.attaching import Settings, attach, detach
from hf_static_kv.patching import replaced


@contextmanager
def attaching_loaded_models(**settings: Any) -> Iterator[None]:
    """Attach every model that `from_pretrained` loads inside the block, in any thread.

    On exit `from_pretrained` is transformers' own again, and these models are detached. It is a
    block and not an environment variable, because child processes inherit a variable: it would act
    in programs that nobody had in mind. A block ends where the code says so.

    Args:
        settings: the arguments of `attach`.

    Example:

        with attaching_loaded_models(reuse_prefix=True):
            main()
    """
    Settings(**settings)  # a wrong argument raises here, not at the first model
    target: Any = PreTrainedModel
    original = vars(target)["from_pretrained"].__func__
    loaded: WeakSet[PreTrainedModel] = WeakSet()

    @wraps(original)
    def from_pretrained(cls: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(cls, *args, **kwargs)
        model = output[0] if isinstance(output, tuple) else output  # output_loading_info=True
        if model.can_generate():
            attach(model, **settings)
            loaded.add(model)
        return output

    try:
        with replaced("from_pretrained", {target: classmethod(from_pretrained)}):
            yield
    finally:
        for model in list(loaded):
            detach(model)
