"""What of the decoder only a GPU can show: captures beside other threads, prompts on the CPU,
shared tables.
"""

from threading import Event, Thread

import pytest
import torch
import transformers
from packaging.version import Version

from hf_static_kv import GraphDecoder, StaticContiguousCache, exact
from hf_static_kv.decoding import speculation
from hf_static_kv.patching import attention_implementation
from hf_static_kv.program.step import DecodeStep
from hf_static_kv.testing import random_model, tiny_config
from tests.conftest import COMMON, PROMPT, toy_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MODES = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7},
    "penalty": {"repetition_penalty": 1.3},
}


def run(model, cache, decoder, ids, **how):
    torch.manual_seed(5)
    cache.reset()
    asked = {**COMMON, "attention_mask": torch.ones_like(ids), **how}
    return model.generate(ids, **asked, past_key_values=cache, custom_generate=decoder)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
@pytest.mark.parametrize("rows", [1, 2])
def test_keys_and_values_in_8_bits_are_read_by_the_kernels(name, rows):
    """In float32, where kernels and the loop of `generate` round apart by little."""
    model = toy_model(name).cuda()
    ids = PROMPT.repeat(rows, 1).cuda()
    caches = [StaticContiguousCache.from_model(model, 60, rows, kv_dtype="int8") for _ in range(2)]
    decoder = GraphDecoder()
    for _ in range(3):  # the third prompt is a captured pass
        tokens = run(model, caches[0], decoder, ids)
    assert decoder.fallback_reason is None
    assert torch.equal(tokens, run(model, caches[1], None, ids))


def test_another_thread_may_wait_for_the_device_while_a_step_is_captured():
    stop, errors, waits = Event(), [], []

    def wait_again_and_again():
        try:
            while not stop.is_set():
                torch.ones(8, device="cuda").sum().item()
                waits.append(None)
        except Exception as error:
            errors.append(error)

    thread = Thread(target=wait_again_and_again)
    thread.start()
    try:
        for seed in range(4):
            model = toy_model("llama", seed=seed).cuda()
            decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 40)
            run(model, cache, decoder, PROMPT.cuda())
            assert decoder.fallback_reason is None
    finally:
        stop.set()
        thread.join()
    assert not errors
    assert len(waits) > 10


def test_a_model_that_waits_for_the_device_is_not_captured():
    model = toy_model("llama").cuda()
    mlp = model.model.layers[0].mlp
    own = type(mlp).forward
    # A number that the host waits for.
    mlp.forward = lambda x: own(mlp, x) * float(x.abs().max() > -1)
    decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 40)
    got = run(model, cache, decoder, PROMPT.cuda())
    assert "synchronizing CUDA operation" in decoder.fallback_reason
    assert torch.equal(got, model.generate(PROMPT.cuda(), **COMMON, use_cache=False))
    assert torch.cuda.get_sync_debug_mode() == 0


def test_what_runs_after_a_failed_capture_waits_for_its_kernels():
    model = toy_model("llama").cuda()
    step, z = (
        DecodeStep(model, StaticContiguousCache.from_model(model, 40), 1),
        torch.zeros(1, dtype=torch.int64),
    )

    def fails(length, seq_start):
        torch.cuda._sleep(100_000_000)  # 0.05 s or more on a GPU of at most 2 GHz
        raise RuntimeError("no step")

    step._run_once = fails
    torch.cuda.synchronize()
    with pytest.raises(RuntimeError, match="no step"):
        step._warm_up(8, z.cuda())
    event = torch.cuda.Event()
    event.record()
    assert not event.query()
    torch.cuda.synchronize()


def test_recording_launches_no_kernel(monkeypatch):
    """It would be compiled alone: those of a step are compiled in parallel."""
    jit = pytest.importorskip("triton.runtime.jit")
    model = toy_model("llama").cuda()
    cache = StaticContiguousCache.from_model(model, 40)
    model(PROMPT.cuda(), past_key_values=cache)
    step = DecodeStep(model, cache, 1)
    monkeypatch.setattr(
        jit.JITFunction, "run", lambda *args, **kwargs: pytest.fail("a kernel is launched")
    )
    with torch.no_grad(), attention_implementation(model, "static_contiguous"):
        step.record(PROMPT.shape[1], torch.zeros(1, dtype=torch.int64, device="cuda"))
    assert step.is_recorded


@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.22"),
    reason="generate wants ids beside the model",
)
@pytest.mark.parametrize("mode", MODES)
def test_ids_on_the_cpu(mode):
    """`generate` leaves them there, and chooses tokens there too."""
    model = toy_model("llama").cuda()
    decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 40)
    torch.manual_seed(5)
    expected = model.generate(
        PROMPT, attention_mask=torch.ones_like(PROMPT), **{**COMMON, **MODES[mode]}
    )
    for _ in range(2):
        got = run(model, cache, decoder, PROMPT, **MODES[mode])
        assert got.device.type == "cpu"
        assert torch.equal(got, expected)
        assert decoder.fallback_reason is None
    assert next(iter(decoder.steps.by_cache[cache].values())).graph is not None


def test_steps_share_their_tables():
    config = tiny_config("gemma3", max_position_embeddings=32768)
    model = random_model(config, device="cuda", dtype=torch.bfloat16)
    decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 32768)
    sizes = []
    for mode in MODES.values():
        run(model, cache, decoder, PROMPT.cuda(), **mode)
        assert decoder.fallback_reason is None
        sizes.append(decoder.memory_bytes)
    (table, *_), *others = [step._tables for step in decoder.steps.by_cache[cache].values()]
    assert others
    assert all(tables[0] is table for tables in others)
    assert table.nbytes == 32768 * 2 * config.head_dim * 2
    assert sizes[0] > 2 * table.nbytes  # of full and of sliding layers
    assert sizes[-1] - sizes[0] < table.nbytes


@pytest.mark.parametrize("how", [{}, {"do_sample": True, "temperature": 0.3, "top_p": 0.9}])
def test_drafts_inside_exact_change_no_bit(how, monkeypatch):
    """In bf16, at sizes where linears and attention of one token and of several differ without it."""
    monkeypatch.setattr(speculation, "_PAYS", -1.0)
    sizes = {"vocab_size": 256, "hidden_size": 1024, "intermediate_size": 4096, "head_dim": 64}
    sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "num_hidden_layers": 3}
    model = random_model(tiny_config("llama", **sizes), device="cuda", dtype=torch.bfloat16)
    decoder, cache = GraphDecoder(), StaticContiguousCache.from_model(model, 160)
    how = {"max_new_tokens": 96, **how}
    with exact(model):
        for seed in range(6):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(3, 256, (1, 9), generator=generator).repeat(1, 6).cuda()
            got = run(model, cache, decoder, ids, prompt_lookup_num_tokens=8, **how)
            torch.manual_seed(5)
            assert torch.equal(got, model.generate(ids, **{**COMMON, **how}, use_cache=False))
    assert decoder.draft_reason is decoder.fallback_reason is None
    assert decoder.accepted.tokens > 20
