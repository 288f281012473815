"""Configs that were prepared before: what `generate` gets is what transformers would prepare."""

import pytest
import torch

from hf_static_kv import attached
from hf_static_kv.decoding.prepared import PreparedConfigs
from tests.conftest import toy_model

IDS = torch.tensor([[5, 6, 7]])
CALLS = [
    {},
    {"max_new_tokens": 4},
    {"max_new_tokens": 4, "do_sample": True},
    {"max_new_tokens": 4, "do_sample": 1},
    {"max_new_tokens": 4, "temperature": 0.5},
    {"max_length": 9, "attention_mask": torch.ones_like(IDS), "use_cache": True},
    {"eos_token_id": [3, 4]},
    {"unknown": 5, "max_new_tokens": 2},
    {"output_attentions": True},
]


@pytest.fixture
def model():
    return toy_model("llama").eval()


class Prepared:
    """Configs of calls of one model."""

    def __init__(self, model):
        self.model = model
        self.configs = PreparedConfigs()
        self.num_prepared = 0  # by transformers

    def __call__(self, **kwargs):
        return self.configs.prepare(self.model, self._original, kwargs)

    def _original(self, given, **kwargs):
        self.num_prepared += 1
        return self.model._prepare_generation_config(given, **kwargs)

    def is_as_transformers(self, **kwargs):
        config, left = self(**kwargs)
        expected, expected_left = self.model._prepare_generation_config(None, **kwargs)
        types = [list(map(type, vars(one).values())) for one in (config, expected)]
        return (
            vars(config) == vars(expected)
            and types[0] == types[1]
            and list(left) == list(expected_left)
            and all(left[name] is expected_left[name] for name in left)
        )


@pytest.fixture
def prepared(model):
    return Prepared(model)


@pytest.mark.parametrize("call", CALLS, ids=str)
def test_the_same_as_transformers(prepared, call):
    for other in (call, call, *CALLS, call):
        assert prepared.is_as_transformers(**other)


def test_prepared_once(prepared):
    mask = torch.ones_like(IDS)
    for _ in range(3):
        prepared(max_new_tokens=4, attention_mask=mask)
    assert prepared.num_prepared == 1
    prepared(max_new_tokens=5, attention_mask=mask)
    assert prepared.num_prepared == 2


def test_a_config_is_the_callers_own(model, prepared):
    """Calls write into it, and into its lists."""
    model.generation_config.eos_token_id = [3, 4]
    for _ in range(3):
        config, _ = prepared(max_new_tokens=4)
        assert (config.max_length, config.eos_token_id) == (20, [3, 4])
        config.max_length = 7
        config.eos_token_id.append(9)


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.generation_config, "temperature", 0.3),
        lambda model: setattr(model.generation_config, "own_entry", 3),
        lambda model: model.generation_config.eos_token_id.append(9),
        lambda model: setattr(model.generation_config, "do_sample", 1),
        lambda model: setattr(model, "generation_config", type(model.generation_config)(top_k=3)),
    ],
)
def test_changed_defaults_count(model, prepared, change):
    model.generation_config.eos_token_id = [3, 4]
    assert prepared.is_as_transformers(max_new_tokens=4)
    change(model)
    for _ in range(2):
        assert prepared.is_as_transformers(max_new_tokens=4)


def test_a_config_of_another_class(model, prepared):
    class Own(type(model.generation_config)):
        def to_dict(self):
            return {**super().to_dict(), "max_new_tokens": 2}

    prepared(do_sample=False)
    own = Own()
    vars(own).update(vars(model.generation_config))
    model.generation_config = own
    assert prepared(do_sample=False)[0].max_new_tokens == 2


def test_defaults_that_change_while_a_config_is_prepared(model):
    """By another thread, which prepares one meanwhile."""
    configs = PreparedConfigs()

    def slow(given, **kwargs):
        result = model._prepare_generation_config(given, **kwargs)
        model.generation_config.top_k = 22
        configs.prepare(model, model._prepare_generation_config, {})
        return result

    model.generation_config.top_k = 11
    configs.prepare(model, slow, {"max_new_tokens": 3})
    again, _ = configs.prepare(model, model._prepare_generation_config, {"max_new_tokens": 3})
    assert again.top_k == 22


def test_generation_parameters_in_the_config_are_still_refused(model):
    with attached(model):
        for _ in range(2):
            model.generate(IDS, max_new_tokens=2)
        model.config.temperature = 0.5
        with pytest.raises(ValueError, match="temperature"):
            model.generate(IDS, max_new_tokens=2)


def test_few_are_kept(model):
    configs = PreparedConfigs()
    for number in range(1, 100):
        kwargs = {"max_new_tokens": number}
        configs.prepare(model, model._prepare_generation_config, kwargs)
    assert len(configs._known) <= 32


def test_defaults_that_cannot_be_compared(model):
    model.generation_config.own_entry = torch.ones(2)
    configs = PreparedConfigs()
    for _ in range(3):
        config, _ = configs.prepare(model, model._prepare_generation_config, {"top_k": 3})
        assert config.top_k == 3
        assert torch.equal(config.own_entry, torch.ones(2))
