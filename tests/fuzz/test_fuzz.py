"""The fuzzer over fixed seeds, and that it sees faults which are put into the cache and the decoder
on purpose.
"""

import pytest
import torch

from hf_static_kv import GraphDecoder, StaticContiguousCache, StaticContiguousLayer
from hf_static_kv.cache.entry import Entry
from hf_static_kv.cache.identity import State
from hf_static_kv.cache.passes import OpenPass
from hf_static_kv.cache.pool import CachePool
from hf_static_kv.program.step import DecodeStep
from tests.fuzz.cases import (
    FAMILIES,
    SEEDS_PER_MODEL,
    Call,
    Case,
    Change,
    Continue,
    Crop,
    Mutation,
    NewText,
    Rows,
    Together,
    make_case,
)
from tests.fuzz.fuzz import CONTENDERS, main, run_seeds
from tests.fuzz.models import available, build_model
from tests.fuzz.mutations import KINDS, mutable
from tests.fuzz.runner import Runner, SkippedCaseError, Tally, run_case, workspace

TESTS = 4
# One case of every architecture in its first variant; `make fuzz` runs as many as one likes.
SEEDS = [model * SEEDS_PER_MODEL for model in range(len(available()))]


@pytest.mark.parametrize("part", range(TESTS))
def test_no_fault_is_found(part):
    seeds = SEEDS[len(SEEDS) * part // TESTS : len(SEEDS) * (part + 1) // TESTS]
    tally = run_seeds(seeds)
    assert [str(fault) for fault in tally.faults] == []
    assert tally.cases == len(seeds)
    assert tally.compared["ours"] >= len(seeds)
    assert all(
        tally.compared[name] >= len(seeds) / 2 for name in ("attached", "attached, with prefixes")
    )
    assert tally.fallbacks["none"] >= len(seeds) / 4  # some families are not captured
    assert len(tally.ties + tally.like_dynamic) <= 1


def test_a_seed_is_a_case():
    assert [make_case(seed) for seed in range(50)] == [make_case(seed) for seed in range(50)]
    assert len({make_case(seed).describe() for seed in range(50)}) == 50


def test_a_case_without_moves_is_otherwise_the_same():
    moves = Change, Continue, Together
    for seed in range(200):
        case, plain = make_case(seed), make_case(seed, without=FAMILIES)
        assert plain.moves == set()
        assert not any(isinstance(event, moves) for event in plain.events)
        if not case.mutation:  # a call is made again after it
            kept = [event for event in case.events if not isinstance(event, moves)]
            assert [type(event) for event in kept] == [type(event) for event in plain.events]


def test_all_moves_are_drawn():
    moves = [make_case(seed).moves for seed in range(1000)]
    for name in (*FAMILIES, *KINDS):
        assert sum(name in found for found in moves) >= 5, name


PROMPT = (((9, 21, 33, 7, 14, 60, 5, 41, 28),),)
GREEDY = {"do_sample": False, "max_new_tokens": 5}


def mutated(kind, numbers, name):
    """Three calls: before the mutation, after it, and after it is taken back."""
    first = Call(*PROMPT, GREEDY, seed=0)
    again = Call(((11, 17),), GREEDY, seed=0)
    events = NewText(), first, Change(), again, Change(), again
    return Case(
        0,
        name,
        0,
        events,
        64,
        1,
        lazy=False,
        pooled=False,
        mutation=Mutation(kind, place(kind, -1), numbers),
    )


def place(kind, skipped):
    """An MLP of the first layer; `skipped` is a module of one that is not the first of its type."""
    return skipped if kind == "skip" else 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutation_is_seen(kind):
    """By every way to use the package: the tokens are those of the model as it is now."""
    run_case(mutated(kind, (-1.0, -2.0), "gemma3"), "cpu", CONTENDERS, tally := Tally())
    assert [str(fault) for fault in tally.faults] == []
    # Caches of the caller's refuse the model.
    assert sum(tally.only_dynamic.values()) == (3 if kind == "skip" else 0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_mutation_changes_the_model_and_is_undone(kind):
    """Otherwise it tests nothing, or breaks the next case."""
    # Of its variants the first one with windows and transformers' own attention.
    model = next(
        model for model in (build_model("gemma3", n, "cpu") for n in range(8)) if uses_sdpa(model)
    )
    ids = torch.tensor([list(PROMPT[0][0])])
    state = {name: weight.clone() for name, weight in model.state_dict().items()}

    @torch.no_grad()
    def logits():
        return model(input_ids=ids, use_cache=False).logits

    own = logits()
    with mutable(model, kind, place=place(kind, 6)) as change:
        change(1.0)
        first = logits()
        change(2.0)
        assert (logits() - first).abs().max() > 1e-3
    assert torch.equal(logits(), own)
    assert all(torch.equal(weight, state[name]) for name, weight in model.state_dict().items())


def uses_sdpa(model):
    return model.config._attn_implementation == "sdpa"


def test_a_contender_may_end_a_case_without_a_fault():
    def act():
        raise SkippedCaseError("compact layers do not go back")

    runner = Runner(make_case(0), "cpu", ("ours",), tally := Tally())
    with pytest.raises(SkippedCaseError, match="do not go back"):
        runner._attempt(runner.contenders[0], act)
    assert tally.faults == []


# --- the fuzzer can fail


def take_every_model_for_the_one_before(monkeypatch):
    monkeypatch.setattr(
        "hf_static_kv.decoding.call.pass_state", lambda model: State("any", "model")
    )


def take_all_keys_for_those_of_this_model(monkeypatch):
    for module in ("attaching", "decoding.call"):
        monkeypatch.setattr(
            f"hf_static_kv.{module}.repeatable_state", lambda model: State("any", "model", "at all")
        )


def lend_a_cache_that_is_in_use(monkeypatch):
    take = CachePool._take

    def broken(pool, *args):
        entry = take(pool, *args)
        pool.free.append(entry)
        return entry

    monkeypatch.setattr(CachePool, "_take", broken)


def reset_a_cache_that_was_returned(monkeypatch):
    shared = StaticContiguousCache.shared

    def broken(cache):
        returned = shared(cache)
        returned.reset()
        return returned

    monkeypatch.setattr(StaticContiguousCache, "shared", broken)


def drop_the_newest_key(monkeypatch):
    write = StaticContiguousLayer.write

    def broken(layer, key_states, value_states):
        keys, values = write(layer, key_states, value_states)
        keys[:, :, -1] = 0
        return keys, values

    monkeypatch.setattr(StaticContiguousLayer, "write", broken)


def see_one_key_less_than_the_window(monkeypatch):
    use_storage = StaticContiguousLayer.use_storage

    def broken(layer, group, index):
        use_storage(layer, group, index)
        if layer.is_sliding:
            layer.sliding_window -= 1

    monkeypatch.setattr(StaticContiguousLayer, "use_storage", broken)


def crop_one_too_few(monkeypatch):
    crop = StaticContiguousCache.crop
    monkeypatch.setattr(StaticContiguousCache, "crop", lambda cache, n: crop(cache, min(0, n + 1)))


def keep_the_rows_in_their_order(monkeypatch):
    def broken(layer, indices):
        layer.batch_size = len(indices)

    monkeypatch.setattr(StaticContiguousLayer, "select_rows", broken)


def count_what_a_failed_pass_wrote(monkeypatch):
    monkeypatch.setattr(OpenPass, "discard", OpenPass.commit)


def begin_the_sequence_of_a_step_one_position_late(monkeypatch):
    set_position = DecodeStep.set_position

    def broken(step, *at):
        set_position(step, *at)
        step.seq_start += 1

    monkeypatch.setattr(DecodeStep, "set_position", broken)
    # It would refuse the step.
    monkeypatch.setattr("hf_static_kv.decoding.steps.verify", lambda step, call: None)


def forget_the_streamer(monkeypatch):
    decode = GraphDecoder._decode

    def broken(decoder, call):
        call.streamer = None
        return decode(decoder, call)

    monkeypatch.setattr(GraphDecoder, "_decode", broken)


def lend_a_cache_with_the_tokens_of_an_earlier_call(monkeypatch):
    keep, free_entry = CachePool._keep, CachePool._free_entry

    def without_reset(method):
        def broken(*args):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(StaticContiguousCache, "reset", lambda cache: None)
                return method(*args)

        return broken

    monkeypatch.setattr(CachePool, "_keep", without_reset(keep))
    monkeypatch.setattr(CachePool, "_free_entry", without_reset(free_entry))
    # It would refuse the cache.
    monkeypatch.setattr("hf_static_kv.cache.cache.check_request", lambda *args: None)


def reuse_a_prefix_that_is_one_too_long(monkeypatch):
    common_prefix = Entry.common_prefix

    def broken(entry, request):
        longest = min(entry.cache.seq_len, request.input_ids.shape[1] - 1)
        return min(common_prefix(entry, request) + 1, longest)

    monkeypatch.setattr(Entry, "common_prefix", broken)
    # It would refuse the cache.
    monkeypatch.setattr("hf_static_kv.cache.cache.check_request", lambda *args: None)


def has(*kinds):
    return lambda case: any(isinstance(event, kinds) for event in case.events)


def has_mutation(*kinds):
    return lambda case: case.mutation is not None and case.mutation.kind in kinds


def has_threads_that_call(case):
    return any(isinstance(event, Together) and not event.plain for event in case.events)


def has_streamer(case):
    return any(getattr(event, "streamer", False) for event in case.events)


def has_failure(case):
    return any(getattr(event, "failure", None) for event in case.events)


def has_window(case):
    return case.architecture in ("mistral", "gemma3", "cohere2")


def has_two_texts(case):
    return sum(isinstance(event, NewText) for event in case.events) > 1


# The fault, and which cases can show it.
FAULTS = {
    drop_the_newest_key: has(Call),
    see_one_key_less_than_the_window: has_window,
    crop_one_too_few: has(Crop),
    keep_the_rows_in_their_order: has(Rows),
    count_what_a_failed_pass_wrote: has_failure,
    begin_the_sequence_of_a_step_one_position_late: has(Call),
    forget_the_streamer: has_streamer,
    lend_a_cache_with_the_tokens_of_an_earlier_call: has_two_texts,
    reuse_a_prefix_that_is_one_too_long: has_two_texts,
}
# Those that moves show, and which ones.
FAULTS_OF_MOVES = {
    take_every_model_for_the_one_before: has_mutation("own number", "tensor"),
    take_all_keys_for_those_of_this_model: has_mutation("weights", "own number"),
    lend_a_cache_that_is_in_use: has_threads_that_call,
    reset_a_cache_that_was_returned: has(Continue),
}
# Faults that few cases show, and a seed that does. It runs first: otherwise 7 and 15 others run
# before it.
SHOWN_BY = {count_what_a_failed_pass_wrote: 34, reuse_a_prefix_that_is_one_too_long: 62}


@pytest.fixture
def _own_caches():
    """Caches that are shared between cases must not carry a fault into other tests."""
    workspace.cache_clear()
    yield
    workspace.cache_clear()


@pytest.mark.usefixtures("_own_caches")
@pytest.mark.parametrize("break_it", [*FAULTS, *FAULTS_OF_MOVES], ids=lambda fault: fault.__name__)
def test_a_fault_is_found(break_it):
    shows = (FAULTS | FAULTS_OF_MOVES)[break_it]
    without = FAMILIES if break_it in FAULTS else ()
    seeds = [seed for seed in range(1000) if shows(make_case(seed, without))][:24]
    seeds.sort(key=lambda seed: seed != SHOWN_BY.get(break_it))
    with pytest.MonkeyPatch.context() as patch:
        break_it(patch)
        fault = next(fault for seed in seeds for fault in run_seeds([seed], without=without).faults)
    assert f"seed {fault.case.seed}: {fault.case.architecture}" in str(fault)
    workspace.cache_clear()
    assert run_seeds([fault.case.seed], without=without).faults == []


def test_a_fault_ends_the_script_with_its_replay(monkeypatch, capsys):
    drop_the_newest_key(monkeypatch)
    # It would silence the loggers of other tests too.
    monkeypatch.setattr("tests.fuzz.fuzz.set_up", lambda: None)
    moves = ["--without", "threads,mutations"]
    monkeypatch.setattr(
        "sys.argv", ["fuzz.py", "--seed", "1", "--cases", "1", "--device", "cpu", *moves]
    )
    assert main() == 1
    output = capsys.readouterr().out
    assert (
        "python -m tests.fuzz.fuzz --seed 1 --cases 1 --device cpu --without 'threads,mutations'"
        in output
    )
    assert "faults: 1" in output
    workspace.cache_clear()
