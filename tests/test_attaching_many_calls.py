"""Many random calls on one attached model: plain tokens, bounded memory, nothing left behind."""

import copy
import gc
import random

import pytest
import torch

from hf_static_kv import attach, attached, cache_bytes, detach, served
from hf_static_kv.decoding.tokens import StopFlags
from tests.conftest import Collect
from tests.decoding.conftest import DEVICE, toy_model
from tests.fuzz.models import at_least

ROWS_TIMES_TOKENS = 2500  # of max_bytes: fewer than most pairs of calls need, more than any call
MODES = (
    "greedy", "greedy", "chat", "chat", "sampled", "padded", "beams", "several", "lookup",
    "chunks", "embeds", "stream",
    "kept", "no cache", "assisted", "fails",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _prompts_of_any_length(monkeypatch):
    monkeypatch.setattr(served, "_MIN_PROMPT_ON_CPU", 0)


class Stop(Exception):
    pass


class Caller:
    """Draws calls and makes each on a plain and on an attached model of the same weights."""

    def __init__(self, name, seed):
        self.rng = random.Random(seed)
        self.plain = toy_model(name)
        self.model = copy.copy(self.plain)
        self.text = None  # of the last chat
        # A DynamicCache of transformers 5.17 cannot be cropped after a window is full.
        has_crop = at_least("5.22") or name != "gemma3"
        self.modes = [mode for mode in MODES if has_crop or mode not in ("assisted", "lookup")]

    def draw(self):
        """The ids, and a function that makes the arguments: each model needs its own streamer and
        so on.
        """
        rng = self.rng
        mode = rng.choice(self.modes)
        rows = 1 if mode in ("lookup", "assisted", "chat") else rng.choice([1, 1, 2, 4])
        length = rng.choice([1, 3, 10, 20, 60])
        ids = torch.tensor(
            [[rng.randrange(3, 128) for _ in range(length)] for _ in range(rows)], device=DEVICE
        )
        if mode == "chat" and self.text is not None and self.text.shape[1] < 200:
            ids = torch.cat([self.text[:, : rng.randrange(1, self.text.shape[1] + 1)], ids], dim=1)
        new_tokens = 300 if rng.random() < 0.01 else rng.choice([1, 2, 5, 9, 30])
        how = {"max_new_tokens": new_tokens, "do_sample": mode == "sampled" or rng.random() < 0.2}
        how["eos_token_id"] = rng.choice([None, list(range(3, 20))])
        how["attention_mask"] = torch.ones_like(ids)
        if mode == "padded" and rows > 1 and length > 3:
            how["attention_mask"][0, : length // 2] = 0
        more = {
            "beams": {"num_beams": 2},
            "several": {"do_sample": True, "num_return_sequences": 2},
            "lookup": {"prompt_lookup_num_tokens": 3, "do_sample": False},
            "chunks": {"prefill_chunk_size": 4},
            "kept": {"return_dict_in_generate": True, "output_logits": True},
            "no cache": {"use_cache": False},
        }
        return mode, ids, {"pad_token_id": 0, **how, **more.get(mode, {})}

    def make(self, model, mode, ids, how):
        """The tokens, or None where the call was made to fail."""
        if mode == "stream":
            how = {**how, "streamer": Collect() if len(ids) == 1 else None}
        if mode == "assisted":
            how = {**how, "assistant_model": self.plain, "do_sample": False}
        if mode == "embeds":
            how = {**how, "inputs_embeds": self.plain.get_input_embeddings()(ids).detach()}
        if mode == "fails":
            how = {**how, "stopping_criteria": [self.fail]}
        torch.manual_seed(0)
        try:
            output = model.generate(ids, **how)
        except Stop:
            return None
        return output if isinstance(output, torch.Tensor) else output.sequences

    def fail(self, ids, scores, **kwargs):
        raise Stop

    def step(self):
        mode, ids, how = self.draw()
        expected = self.make(self.plain, mode, ids, how)
        state = torch.get_rng_state()
        got = self.make(self.model, mode, ids, how)
        assert (got is None) == (expected is None)
        assert got is None or torch.equal(got, expected), mode
        assert torch.equal(torch.get_rng_state(), state), mode
        if mode == "chat":
            self.text = expected


def live_tensors():
    """Their number, and the bytes of their memory."""
    gc.collect()
    if DEVICE == "cuda":
        torch._C._cuda_clearCublasWorkspaces()  # kept for each stream that was ever used
    # No others: those that compilers leave behind have no memory.
    kinds = (
        torch.Tensor,
        torch.nn.Parameter,
    )
    tensors = [
        thing for thing in gc.get_objects() if type(thing) in kinds and thing.device.type == DEVICE
    ]
    stores = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }
    return len(tensors), torch.cuda.memory_allocated() if DEVICE == "cuda" else sum(stores.values())


@pytest.mark.parametrize("number", [30, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("name", "reuse_prefix"), [("llama", False), ("gemma3", True)])
def test_many_calls(name, reuse_prefix, number):
    caller = Caller(name, seed=number)
    max_bytes = cache_bytes(caller.plain.config, ROWS_TIMES_TOKENS, dtype=torch.float32)
    # What libraries keep once for a process, such as workspaces, is not counted.
    with attached(caller.model):
        caller.model.generate(
            torch.full((1, 20), 7, device=DEVICE), max_new_tokens=20, do_sample=False
        )
    before = live_tensors()
    info = attach(caller.model, max_bytes=max_bytes, reuse_prefix=reuse_prefix)
    for _ in range(number):
        caller.step()
        assert info.pool.num_bytes <= max_bytes  # captured steps hold memory of their own
        assert info.pool.in_use == []
    assert info.hits > number / 4
    assert info.reused_tokens > 0 or not reuse_prefix
    _, num_bytes = live_tensors()
    # Where captured steps have memory, too.
    assert num_bytes - before[1] < max_bytes + 2**20 or DEVICE == "cuda"
    info.pool.clear()
    # What transformers leaves in its configs, and the last call's text.
    assert live_tensors()[0] - before[0] < 20
    detach(caller.model)
    del info
    caller.text = None
    assert live_tensors()[1] - before[1] < 2**16


class OneBehind(StopFlags):
    """As on a GPU: the host reads a flag when the next token is selected."""

    def push(self, flag, is_last):
        self.pending.append(bool(flag))
        return len(self.pending) if len(self.pending) > 1 and self.pending.popleft() else 0

    def newest(self):
        return self.pending[-1]


@pytest.mark.parametrize("new_tokens", [2, 3, 8])
def test_a_token_too_many_is_removed_from_the_cache_that_has_it(monkeypatch, new_tokens):
    """Also if the prefix was of another model, and the call goes on with another cache."""
    monkeypatch.setattr("hf_static_kv.decoding.tokens.StopFlags", OneBehind)
    monkeypatch.setattr("hf_static_kv.served._DECODER_DEVICES", (DEVICE,))
    model = toy_model("llama").to(DEVICE)
    ids = torch.arange(1, 21, device=DEVICE)[None]
    options = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    with attached(model, reuse_prefix=True) as info:
        model.generate(ids, max_new_tokens=1, do_sample=False)
        with torch.no_grad():
            model.model.norm.weight.mul_(1.01)
        longer = torch.cat([ids, ids[:, :4]], dim=1)
        plain = model.generate(longer, max_new_tokens=1, use_cache=False, **options).sequences
        ends = {"eos_token_id": int(plain[0, -1])}
        output = model.generate(longer, max_new_tokens=new_tokens, **ends, **options)
        assert info.fallback_reason is None
        assert torch.equal(output.sequences, plain)
        assert output.past_key_values.get_seq_length() == longer.shape[1]
