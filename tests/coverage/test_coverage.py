"""docs/coverage.md is true: it is what its records say, and the records are what a measurement
gives.
"""

import os
import time
from contextlib import nullcontext

import pytest

from hf_static_kv import StaticContiguousCache
from tests.coverage import measure as measuring
from tests.coverage.measure import DECODERS, RECORDS, VERSION, YES, exactness, measure, measure_all
from tests.coverage.small_models import small_model
from tests.coverage.write_page import NEWEST, OLDEST, PAGE, load, page

# One of each kind: a window, experts, a hybrid, latents, an encoder as decoder, and one that is
# refused.
SAMPLE = ["gemma3_text", "qwen3_moe", "falcon_h1", "minicpm3", "bert", "mamba"]
recorded = pytest.mark.skipif(
    not (RECORDS / f"{VERSION}.json").exists(),
    reason=f"no record of transformers {VERSION}: both ends have one",
)


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text() == page(load(NEWEST), load(OLDEST))


@recorded
def test_the_record_has_every_decoder():
    assert list(load(VERSION)) == sorted(DECODERS)


@pytest.mark.parametrize("version", [NEWEST, OLDEST])
def test_no_decoder_gets_other_tokens_or_bits(version):
    faults = {"other tokens", "other bits"}
    assert {name: row for name, row in load(version).items() if faults & {*row.values()}} == {}


@recorded
@pytest.mark.parametrize("name", SAMPLE)
def test_a_row_is_measured_again(name):
    assert measure(name) == load(VERSION)[name]


@recorded
@pytest.mark.slow
def test_all_rows_are_measured_again():
    assert measure_all(sorted(DECODERS)) == load(VERSION)


# --- the measurement sees faults


class Forgetful(StaticContiguousCache):
    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        if self.get_seq_length() == 0:
            value_states = value_states.clone()
            value_states[:, :, -2] = 0
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def test_a_lost_key_is_seen(monkeypatch):
    monkeypatch.setattr(measuring, "StaticContiguousCache", Forgetful)
    assert measure("llama") == {"cache": "other tokens"}


def test_other_bits_are_seen(monkeypatch):
    model = small_model("llama")
    assert exactness(model) == YES
    monkeypatch.setattr(measuring, "exact", nullcontext)
    assert exactness(model) == "other bits"


def test_a_model_that_hangs_or_dies_gets_a_row(monkeypatch):
    acts = {
        "hangs": lambda: time.sleep(60),
        "dies": lambda: os._exit(1),
        "fails": lambda: {}["key"],
        "runs": dict,
    }
    monkeypatch.setattr(measuring, "measure", lambda name: acts[name]())
    rows = measure_all(list(acts), seconds=1.0)
    assert rows["hangs"] == {"cache": "not measured: no answer in 1.0 s"}
    assert rows["dies"] == {"cache": "not measured: its process died"}
    assert rows["fails"] == {"cache": "not measured: KeyError: 'key'"}
    assert rows["runs"] == {}
