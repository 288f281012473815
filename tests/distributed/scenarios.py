"""What one rank of a test does.

Each function runs in every rank, and returns what the test compares.
"""

import torch
import transformers
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig
from transformers.distributed.tensor_parallel import apply_tensor_parallelism
from transformers.models.gemma3 import modeling_gemma3  # noqa: F401  # the server imports them once for all ranks
from transformers.models.llama import modeling_llama  # noqa: F401
from transformers.models.olmo2 import modeling_olmo2  # noqa: F401
from transformers.models.qwen3 import modeling_qwen3  # noqa: F401

from hf_static_kv import GraphDecoder, StaticContiguousCache, attach, attached, cache_bytes, exact
from hf_static_kv import attaching as attaching_module
from hf_static_kv.cache import allocation, storage
from hf_static_kv.cache import pool as pool_module
from hf_static_kv.cache.identity import State
from hf_static_kv.decoding import call as call_module
from tests.conftest import COMMON, PROMPT, toy_model

CAPACITY = 32
# Few tokens: ranks that share a core wait milliseconds for each of the sums in a pass.
GREEDY = {**COMMON, "max_new_tokens": 5}
SAMPLED = {**GREEDY, "do_sample": True, "temperature": 1.5}
PADDED = torch.tensor(
    [[17, 93, 5, 64, 5, 88, 121, 40, 17, 93], [0, 0, 0, 0, 12, 101, 3, 55, 8, 71]]
)
CALLS = {"greedy": (PROMPT, GREEDY), "padded": (PADDED, GREEDY), "sampled": (PADDED, SAMPLED)}


def generate(model, call, **how):
    ids, options = CALLS[call]
    torch.manual_seed(5)
    return model.generate(ids, attention_mask=(ids > 0).long(), **options, **how).tolist()


def load(folder, ranks, plan=None):
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    config = DistributedConfig(tp_size=ranks, tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(folder, distributed_config=config).eval()


def all_ways(rank, folder, ranks, plan=None):
    """The tokens of calls in every way to have a cache, and what this rank holds."""
    model, decoder = load(folder, ranks, plan), GraphDecoder()
    early = StaticContiguousCache.from_model(model, CAPACITY, batch_size=2)
    lazy = StaticContiguousCache(model.config, CAPACITY)
    tokens = {
        ("padded", "early"): generate(model, "padded", past_key_values=early),
        ("sampled", "lazy"): generate(model, "sampled", past_key_values=lazy),
        ("sampled", "decoder"): generate(model, "sampled", custom_generate=decoder),
    }
    with attached(model, reuse_prefix=True) as info:
        for call in ("sampled", "greedy", "greedy"):  # a prompt without padding, and its prefix
            tokens[call, f"attached, {info.calls}"] = generate(model, call)
    foretold = cache_bytes(model.config, CAPACITY, 2, torch.float32, tp=ranks, tp_plan=plan)
    return {
        "tokens": tokens,
        "heads": {layer.shape.num_kv_heads for cache in (early, lazy) for layer in cache.layers},
        "bytes": {foretold, early.memory_bytes, lazy.memory_bytes},
        "reason": decoder.fallback_reason,
        "attached": (info.calls, info.hits, info.reused_tokens),
    }


def heads_that_do_not_divide(rank, folder, ranks):
    model = load(folder, ranks)
    return error_of(lambda: StaticContiguousCache.from_model(model, CAPACITY))


def error_of(act):
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


class OneRankOutOfMemory:
    """Inside, this rank's allocations fail, if it is the last one."""

    def __init__(self, rank, ranks):
        self.is_short = rank == ranks - 1

    def __enter__(self):
        self.own = allocation.allocate_groups
        if self.is_short:
            allocation.allocate_groups = storage.allocate_groups = self.fail

    def fail(self, *args):
        raise torch.OutOfMemoryError("this rank is full")

    def __exit__(self, *error):
        allocation.allocate_groups = storage.allocate_groups = self.own


def one_rank_out_of_memory(rank, folder, ranks):
    """Every way to allocate, with one rank that cannot: the errors, the state after them, and the
    tokens of a retry.
    """
    model = load(folder, ranks)
    lazy, growing = (StaticContiguousCache(model.config, length) for length in (CAPACITY, 16))
    growing.grows = True
    with torch.no_grad():
        model(PROMPT, past_key_values=growing)
    errors = {}
    with OneRankOutOfMemory(rank, ranks):
        errors["from_model"] = error_of(lambda: StaticContiguousCache.from_model(model, CAPACITY))
        errors["first pass"] = error_of(
            lambda: model.generate(PROMPT, past_key_values=lazy, **GREEDY)
        )
        errors["grow"] = error_of(lambda: model(PROMPT, past_key_values=growing))
    left = lazy.memory_bytes, lazy.seq_len, growing.max_cache_len, growing.seq_len
    growing.crop(-1)
    tokens = [generate(model, "greedy", past_key_values=cache) for cache in (lazy, growing)]
    return errors, left, tokens


def attached_and_out_of_memory(rank, folder, ranks):
    """A call whose cache one rank cannot allocate, and the next one."""
    model = load(folder, ranks)
    info = attach(model, reuse_prefix=True)
    with OneRankOutOfMemory(rank, ranks):
        first = generate(model, "sampled"), info.fallback_reason
    return [first, (generate(model, "sampled"), info.hits, len(info.caches))]


def out_of_memory_inside_the_model(rank, folder, ranks):
    """Where the model itself is short of memory a rank must not begin the call again by itself."""
    model = load(folder, ranks)
    attach(model, reuse_prefix=True)
    # On every rank: none waits here.
    started, model.model.norm.forward = (
        [],
        lambda x: OneRankOutOfMemory.fail(None),
    )
    model.model.register_forward_pre_hook(lambda *args: started.append(None))
    return error_of(lambda: generate(model, "greedy")), len(started)


def bounds_that_differ(rank, folder, ranks):
    """The memory of the host differs from rank to rank: so few bytes on the last that no prompt
    fits.
    """
    model = load(folder, ranks)
    pool_module.host_bytes = lambda: 4 * (1 if rank == ranks - 1 else 1 << 30)
    info = attach(model, reuse_prefix=True)
    return generate(model, "greedy"), info.pool.max_bytes, info.fallback_reason


def weights_that_differ(rank, folder, ranks):
    """One rank takes the model for another one in each call, so its cached prefix does not count."""
    model = load(folder, ranks)
    if rank == ranks - 1:
        for module in (attaching_module, call_module):
            module.repeatable_state = lambda *model: State(object(), object())
    info = attach(model, reuse_prefix=True)
    return [generate(model, "greedy") for _ in range(3)], info.reused_tokens


def errors_of_a_call(rank, folder, ranks):
    """Calls that are refused, and the tokens of a call after them."""
    model = load(folder, ranks)
    cache = StaticContiguousCache.from_model(model, CAPACITY)
    long = {**GREEDY, "max_new_tokens": CAPACITY}

    def enter_exact():
        with exact(model):
            generate(model, "greedy")

    errors = {
        "too long": error_of(lambda: model.generate(PROMPT, past_key_values=cache, **long)),
        "too many rows": error_of(lambda: generate(model, "padded", past_key_values=cache)),
        "full": error_of(lambda: [model(PROMPT, past_key_values=cache) for _ in range(CAPACITY)]),
        "exact": error_of(enter_exact),
        "attach": error_of(lambda: attach(model, exact=True)),
    }
    cache.reset()
    return errors, generate(model, "greedy", past_key_values=cache)


def world_of_one(rank, name, device):
    """A model whose weights are DTensors and whose sums go through the backend, in one process."""
    model = toy_model(name).to(device)
    ids = PROMPT.to(device)
    expected = model.generate(ids, **GREEDY, use_cache=False).tolist()
    # Since transformers 5.23 it takes a plan in which every layer is named.
    expand = getattr(model, "_expand_parallel_plan", None)
    plan = () if expand is None else (expand(model.tp_plan),)
    apply_tensor_parallelism(model, init_device_mesh(device, (1,)), *plan)
    cache, decoder = StaticContiguousCache.from_model(model, CAPACITY), GraphDecoder()
    found = [model.generate(ids, **GREEDY, past_key_values=cache).tolist()]
    cache.reset()
    found.append(
        model.generate(ids, **GREEDY, past_key_values=cache, custom_generate=decoder).tolist()
    )
    with attached(model, reuse_prefix=True) as info:
        found += [model.generate(ids, **GREEDY).tolist() for _ in range(2)]
    reasons = decoder.fallback_reason, info.fallback_reason
    return [tokens == expected for tokens in found], reasons, info.reused_tokens
