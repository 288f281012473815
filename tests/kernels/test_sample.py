"""Sampling in a captured step: plainly as transformers samples, and the kernels as the plain
formula.
"""

from functools import partial
from itertools import combinations

import pytest
import torch
from transformers.generation import logits_process as processors

from hf_static_kv.kernels.sample import (
    Processors,
    SampleState,
    process_plain,
    select_sampled,
    select_sampled_plain,
)
from hf_static_kv.kernels.select_greedy import GreedyState
from tests.conftest import given, settings, st, triton_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = Processors(*[True] * 6)
NO_LIMIT = {"top_k": False, "top_p": False, "min_p": False}
POSITION, LENGTH = 3, 8  # of the newest token, of the token buffer


def make_state(batch, kinds, **numbers):
    numbers = {
        "temperature": 1.0, "top_k": 7, "top_p": 0.8, "min_p": 0.02, "repetition_penalty": 2.0,
        "min_length": 0,
    } | numbers  # fmt: skip
    # Tokens after the newest one must not count: token 4 is none of the past.
    sequences = torch.tensor([[2, 0, 1, 2, 4, 4, 4, 4]], device=DEVICE).repeat(batch, 1)
    selection = GreedyState(
        sequences=sequences,
        token=torch.zeros(batch, 1, dtype=torch.int64, device=DEVICE),
        unfinished=torch.ones(batch, 1, dtype=torch.bool, device=DEVICE),
        eos=torch.tensor([[1, 3] + [-1] * 14], device=DEVICE).repeat(batch, 1),
        pad=torch.tensor([9], device=DEVICE).repeat(batch),
        is_over=torch.tensor(False, device=DEVICE),
        last=torch.tensor([LENGTH], device=DEVICE).repeat(batch),
        counts=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
        report=torch.zeros(batch, dtype=torch.int64, device=DEVICE),
    )
    tensors = {
        name: torch.tensor(
            [number], dtype=torch.float64 if isinstance(number, float) else None, device=DEVICE
        ).repeat(batch)
        for name, number in numbers.items()
    }
    return SampleState(selection, kinds, **tensors)


def positions(batch):
    return torch.full((batch,), POSITION, device=DEVICE)


def normal(*shape, seed=0, scale=1.0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE) * scale


def exponential(*shape, seed=0):
    return (
        torch.empty(shape).exponential_(1, generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    )


def of_transformers(logits, state):
    """Tokens [B] and processed scores as `generate` computes them."""
    number = {name: getattr(state, name)[0].item() for name in SampleState._fields[2:]}
    made = (
        (
            "repetition",
            lambda: processors.RepetitionPenaltyLogitsProcessor(number["repetition_penalty"]),
        ),
        (
            "min_length",
            lambda: processors.MinLengthLogitsProcessor(
                number["min_length"], [1, 3], device=DEVICE
            ),
        ),
        ("temperature", lambda: processors.TemperatureLogitsWarper(number["temperature"])),
        ("top_k", lambda: processors.TopKLogitsWarper(number["top_k"])),
        ("top_p", lambda: processors.TopPLogitsWarper(number["top_p"])),
        ("min_p", lambda: processors.MinPLogitsWarper(number["min_p"])),
    )
    scores, past = logits.float(), state.selection.sequences[:, : POSITION + 1]
    for kind, make in made:
        if getattr(state.kinds, kind):
            scores = make()(past, scores)
    return torch.multinomial(scores.softmax(dim=-1), 1)[:, 0], scores


def rng_state():
    return torch.cuda.get_rng_state() if DEVICE == "cuda" else torch.get_rng_state()


class TestPlain:
    """On a CPU `select_sampled` is the plain formula; a GPU runs it for more rows than the kernels
    take.
    """

    @given(
        kinds=st.builds(Processors, *[st.booleans()] * 6),
        seed=st.integers(0, 1 << 30),
        batch=st.sampled_from([1, 3]),
        vocabulary=st.sampled_from([5, 37, 300, 1000]),
        scale=st.sampled_from([0.1, 1.0, 8.0]),
        temperature=st.sampled_from([0.3, 0.7, 1.3]),
        top_k=st.sampled_from([1, 2, 50, 4000]),
        top_p=st.sampled_from([0.0, 0.1, 0.9, 0.999, 1.0]),
        min_p=st.sampled_from([0.0, 0.05, 0.3, 1.0]),
        min_length=st.sampled_from([0, POSITION + 1, POSITION + 2]),
    )
    @settings(max_examples=150, deadline=None)
    def test_scores_tokens_and_generator_are_those_of_transformers(
        self, kinds, seed, batch, vocabulary, scale, temperature, top_k, top_p, min_p, min_length
    ):
        batch = batch if DEVICE == "cpu" else batch + 64
        numbers = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "min_length": min_length,
        }
        logits = normal(batch, vocabulary, seed=seed, scale=scale)
        logits = logits.bfloat16() if seed % 2 else logits  # many ties
        expected, got = (
            make_state(batch, kinds, repetition_penalty=1.3, **numbers) for _ in range(2)
        )
        torch.manual_seed(seed)
        tokens, scores = of_transformers(logits, expected)
        after = rng_state()
        torch.manual_seed(seed)
        select_sampled(logits, positions(len(logits)), got)
        assert torch.equal(rng_state(), after)
        assert got.selection.token[:, 0].tolist() == tokens.tolist()
        assert torch.equal(process_plain(logits, positions(len(logits)), got), scores)
        assert got.selection.sequences[:, POSITION + 1].tolist() == tokens.tolist()

    @pytest.mark.skipif(
        DEVICE == "cuda", reason="in transformers 5.17 it ends the process's use of the GPU"
    )
    def test_a_token_without_a_logit_is_not_penalized(self):
        state = make_state(1, Processors(repetition=True))
        without = make_state(1, Processors(repetition=True))
        state.selection.sequences[0, 1] = 10
        # It stands there twice already; transformers 5.17 refuses 10.
        without.selection.sequences[0, 1] = 2
        logits = normal(1, 10)
        processed = process_plain(logits, positions(len(logits)), state)
        assert torch.equal(processed, of_transformers(logits, without)[1])

    def test_rows_that_have_ended_and_rows_that_end(self):
        state = make_state(3, Processors())
        state.selection.unfinished[0] = False
        logits = torch.full((3, 12), -torch.inf, device=DEVICE)
        logits[0, 5] = logits[1, 3] = logits[2, 6] = 0
        select_sampled(logits, positions(len(logits)), state)
        assert state.selection.token.tolist() == [[9], [3], [6]]
        assert state.selection.unfinished.tolist() == [[False], [False], [True]]
        assert not state.selection.is_over


def limits(scores, kinds, state, slack=None):
    """Masks of the tokens that must be kept and that may be kept, by float64; what is between is
    within rounding.

    top_p sorts: of equal scores the higher token comes later in ascending order, and is kept first.
    A mass is a sum of V weights, off by V eps. exp is off by an eps or two, on a GPU by |score -
    max| eps more, where the weight is large that is little: 104 at most, below that a weight is 0.
    """
    scores = scores.double()
    slack = (scores.shape[-1] + 110) * torch.finfo(torch.float32).eps if slack is None else slack
    must, may = torch.ones_like(scores, dtype=torch.bool), torch.ones_like(scores, dtype=torch.bool)
    if kinds.top_k:
        k = min(state.top_k[0].item(), scores.shape[-1])
        must = may = scores >= scores.topk(k).values[:, -1:]
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    if kinds.top_p and state.top_p[0].item() < 1:
        place = places(scores)
        # Ascending.
        kept = torch.zeros_like(scores).scatter(1, place, torch.where(must, weights, 0))
        above = (
            (kept.sum(-1, keepdim=True) - kept.cumsum(-1)) / kept.sum(-1, keepdim=True)
        ).gather(1, place)
        p, is_last = state.top_p[0].item(), place == scores.shape[-1] - 1
        must, may = (m & ((above < p + s) | is_last) for m, s in ((must, -slack), (may, slack)))
    if kinds.min_p:
        p = state.min_p[0].item()
        must, may = must & (weights >= p * (1 + slack)), may & (weights >= p * (1 - slack))
    return must, may


def places(scores):
    """The place of each token in ascending order."""
    return scores.sort(dim=-1, stable=True).indices.argsort(dim=-1)


def probes(scores, must, may):
    """Noise for two rows each: the lowest token that must be kept would win, so would the highest
    that may not.
    """
    noise, place = torch.full_like(scores, 1e30).repeat(2, 1), places(scores)
    lowest = torch.where(must, place, scores.shape[-1]).argmin(-1)
    highest = torch.where(may, -1, place).argmax(-1)
    noise.scatter_(1, torch.cat([lowest, highest])[:, None], 1e-37)
    return noise, lowest, highest


def logits_of(shape, vocabulary, seed):
    logits = normal(1, vocabulary, seed=seed)
    if shape == "peaked":
        logits = logits * 12
    elif shape == "flat":
        logits = logits * 1e-3
    elif shape == "ties":
        logits = (logits * 2).round() / 2  # 0.0 and -0.0 among them
    elif shape == "infinite":
        logits = logits.masked_fill(normal(1, vocabulary, seed=seed + 1) > 0.3, -torch.inf)
    elif shape == "equal":
        logits = torch.full_like(logits, -1.5)
    elif shape == "wide":  # from the least to nearly the largest numbers of float16
        logits = logits.sign() * 2.0 ** (logits.abs() * 12 - 24).clamp(max=15)
    return logits


class TestKernels:
    @pytest.fixture(autouse=True)
    def _few_chunks(self, monkeypatch):
        """The interpreter takes 10 ms for a program."""
        self.kernels = triton_module("hf_static_kv.kernels.sample_triton")
        if DEVICE == "cpu":
            monkeypatch.setattr(self.kernels, "_NUM_CHUNKS", 2)

    def select(self, logits, noise, state):
        self.kernels.select_sampled_triton(logits, noise, positions(len(logits)), *state)
        return state.selection.token[:, 0]

    def select_plainly(self, logits, noise, state):
        select_sampled_plain(logits, noise, positions(len(logits)), state)
        return state.selection.token[:, 0]

    @pytest.mark.parametrize("shape", ["normal", "peaked", "flat", "ties", "infinite"])
    @pytest.mark.parametrize(
        ("kinds", "numbers"),
        [
            (Processors(top_k=True), {"top_k": 5}),
            (Processors(top_p=True), {"top_p": 0.6}),
            (
                Processors(temperature=True, top_k=True, top_p=True),
                {"temperature": 2.0, "top_k": 20, "top_p": 0.9},
            ),
            (Processors(min_p=True), {"min_p": 0.1}),
        ],
        ids=["top_k", "top_p", "both", "min_p"],
    )
    def test_what_is_kept(self, kinds, numbers, shape):
        logits = logits_of(shape, 203, seed=len(shape))
        scores = logits / 2 if kinds.temperature else logits
        state = make_state(2, kinds, **numbers)
        must, may = limits(scores, kinds, state)
        # On a CPU torch's sort keeps no order of equal scores.
        if not (kinds.top_p and shape == "ties"):
            kept = (
                process_plain(logits, positions(len(logits)), make_state(1, kinds, **numbers))
                > -torch.inf
            )
            assert not (must & ~kept & (scores > -torch.inf)).any()
            assert not (kept & ~may).any()
        noise, lowest, highest = probes(scores, must & (scores > -torch.inf), may)
        tokens = self.select(logits.repeat(2, 1), noise, state)
        assert tokens[0] == lowest
        assert may.all() or tokens[1] != highest

    @pytest.mark.parametrize(
        ("top_k", "top_p"), [(None, 0.0), (None, 0.55), (None, 0.97), (60, 0.9)]
    )
    def test_of_equal_scores_at_the_edge_those_of_transformers(self, top_k, top_p, monkeypatch):
        """Every row has its own edge.

        A row has about ten values, so up to fifty ties in all chunks.
        """
        if DEVICE == "cpu":
            monkeypatch.setattr(self.kernels, "_NUM_CHUNKS", 4)
            monkeypatch.setattr(torch, "sort", partial(torch.sort, stable=True))  # on a GPU it is
        logits = torch.cat([(normal(1, 203, seed=seed) * 1.5).round() for seed in range(2)])
        state = make_state(
            4, Processors(top_k=top_k is not None, top_p=True), top_k=top_k or 0, top_p=top_p
        )
        kept = of_transformers(logits, state)[1] > -torch.inf
        noise, lowest, highest = probes(logits, kept, kept)
        tokens = self.select(logits.repeat(2, 1), noise, state)
        assert tokens[:2].tolist() == lowest.tolist()
        assert not (tokens[2:] == highest).any()

    @pytest.mark.parametrize(
        ("dtype", "shape", "temperature", "left_out"),
        [
            (torch.bfloat16, "normal", 0.7, "top_p"),
            (torch.bfloat16, "ties", 1.3, "top_k"),
            (torch.bfloat16, "infinite", 1e4, "min_p"),
            (torch.bfloat16, "equal", 1e-4, "min_p"),
            (torch.bfloat16, "wide", 1e-4, "top_k"),
            (torch.float16, "wide", 1e4, "min_p"),
        ],
        ids=str,
    )
    def test_keys_of_fewer_bits_keep_what_those_of_32_keep(
        self, dtype, shape, temperature, left_out
    ):
        """In float32 the scores are scaled before the search. Each noise asks for another token."""
        rows = 2 if DEVICE == "cpu" else 50
        kinds = ALL._replace(repetition=False, **{left_out: False})
        logits = logits_of(shape, 203, seed=3).to(dtype).repeat(rows, 1)
        noise = exponential(rows, 203) ** 4
        how = {"temperature": temperature, "top_k": 40, "min_length": POSITION + 2}
        few, all_bits = (
            self.select(own, noise, make_state(rows, kinds, **how))
            for own in (logits, logits.float())
        )
        assert few.tolist() == all_bits.tolist()

    @pytest.mark.parametrize("top_k", [50, 150])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_neighbours_are_told_apart(self, dtype, top_k):
        """The numbers of a dtype that follow one another from 1 on, and from -1 on."""
        ones = torch.tensor([[1.0], [-1.0]]).to(dtype).view(torch.int16)
        logits = (ones + torch.arange(100, dtype=torch.int16)).view(dtype).view(1, 200).to(DEVICE)
        kinds = Processors(temperature=True, top_k=True)
        state = make_state(2, kinds, temperature=0.7, top_k=top_k)
        noise, lowest, highest = probes(logits.float(), *limits(logits, kinds, state))
        tokens = self.select(logits.repeat(2, 1), noise, state)
        assert tokens[0] == lowest
        assert tokens[1] != highest

    def test_scores_that_the_temperature_makes_equal(self):
        """The second largest is kept as often as it is there after the division."""
        logits = torch.tensor([[-3.0, 1.0, -0.0, 1.25, 1.5, 0.0]], device=DEVICE).bfloat16()
        numbers = {"temperature": 1e45, "top_k": 2}
        state = make_state(6, Processors(temperature=True, top_k=True), **numbers)
        noise = torch.full((6, 6), 1e30, device=DEVICE).fill_diagonal_(1e-30)
        kept = self.select(logits.repeat(6, 1), noise, state)
        scores = logits.float() * torch.tensor(1e-45, dtype=torch.float64).float().to(DEVICE)
        assert scores[0, 1] == scores[0, 3]
        assert [b in (1, 3, 4) for b in range(6)] == [int(t) == b for b, t in enumerate(kept)]

    @given(
        seed=st.integers(0, 1 << 30),
        vocabulary=st.integers(2, 300),
        top_k=st.integers(1, 40),
        top_p=st.floats(0.01, 0.99),
        shape=st.sampled_from(["normal", "peaked", "flat", "ties"]),
    )
    @settings(max_examples=8 if DEVICE == "cpu" else 50, deadline=None)
    def test_what_is_kept_under_any_numbers(self, seed, vocabulary, top_k, top_p, shape):
        logits, kinds = logits_of(shape, vocabulary, seed), Processors(top_k=True, top_p=True)
        state = make_state(2, kinds, top_k=top_k, top_p=top_p)
        must, may = limits(logits, kinds, state)
        noise, lowest, highest = probes(logits, must, may)
        tokens = self.select(logits.repeat(2, 1), noise, state)
        assert tokens[0] == lowest
        assert may.all() or tokens[1] != highest

    @pytest.mark.parametrize(
        "numbers", [{"top_k": 1}, {"top_p": 0.0}, {"top_p": 1.0}, {"top_k": 500}], ids=str
    )
    def test_the_ends_of_the_ranges(self, numbers):
        kinds = Processors(top_k="top_k" in numbers, top_p="top_p" in numbers)
        logits, state = normal(1, 67), make_state(2, kinds, **numbers)
        noise, lowest, _ = probes(logits, *limits(logits, kinds, state))
        tokens = self.select(logits.repeat(2, 1), noise, state)
        assert tokens[0] == lowest
        assert "top_k" not in numbers or numbers["top_k"] > 67 or tokens[1] == lowest
        assert numbers.get("top_p") != 0.0 or tokens[1] == lowest

    @pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)], ids=str)
    def test_zeros_of_either_sign_are_equal(self, zeros):
        logits = torch.tensor([[-1.0, zeros[0], 1.0, zeros[1]]], device=DEVICE).repeat(2, 1)
        noise = torch.full_like(logits, 1e30)
        noise[0, 1] = noise[1, 3] = 1e-30
        assert self.select(
            logits, noise, make_state(2, Processors(top_k=True), top_k=2)
        ).tolist() == [
            1,
            3,
        ]

    @pytest.mark.parametrize(("batch", "vocabulary", "seed"), [(1, 5, 1), (3, 130, 2), (2, 301, 3)])
    @pytest.mark.parametrize("min_length", [POSITION + 1, POSITION + 2])
    def test_all_together(self, batch, vocabulary, seed, min_length):
        """The same tokens as the plain formula.

        Powers of two: a division by them is exact either way.
        """
        logits, noise = (
            normal(batch, vocabulary, seed=seed, scale=2.0),
            exponential(batch, vocabulary, seed=seed),
        )
        logits[:, 1] += 20  # an end token, which would win
        states = [
            make_state(batch, ALL, temperature=0.5, min_length=min_length, top_p=0.95)
            for _ in range(2)
        ]
        states[0].selection.unfinished[0] = states[1].selection.unfinished[0] = batch == 1
        select_sampled_plain(logits, noise, positions(len(logits)), states[0])
        self.select(logits, noise, states[1])
        for a, b in zip(states[0].selection, states[1].selection, strict=True):
            assert torch.equal(a, b)
        assert (states[0].selection.token[-1].item() == 1) == (min_length == POSITION + 1)

    @pytest.mark.parametrize("by_kernel", [True, False])
    def test_a_row_has_numbers_of_its_own(self, by_kernel):
        """Each row of a batch as if it were alone; the last one takes the most likely token."""
        numbers = [
            {"temperature": 0.5, "top_k": 9, "top_p": 0.9, "min_p": 0.0, "repetition_penalty": 1.0},
            {"temperature": 2.0, "top_k": 300, "top_p": 1.0, "min_p": 0.25, "min_length": 5},
            {"temperature": 1.0, "top_k": 1, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0},
        ]
        logits, noise = normal(3, 130, scale=2.0), exponential(3, 130)
        logits[1, 1] += 20  # an end token, which would win
        together = make_state(3, ALL)
        for b, own in enumerate(numbers):
            for name, number in own.items():
                getattr(together, name)[b] = number
        together.selection.eos[2] = logits[2].argmax()
        together.selection.last[0] = POSITION + 1
        select = self.select if by_kernel else self.select_plainly
        tokens = select(logits, noise, together).tolist()
        for b, own in enumerate(numbers):
            alone = select(logits[b : b + 1], noise[b : b + 1], make_state(1, ALL, **own))
            assert alone.tolist() == [tokens[b]]
        assert tokens[2] == logits[2].argmax()
        assert together.selection.unfinished[:, 0].tolist() == [False, True, False]

    @pytest.mark.parametrize(
        "dtype", [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"), ids=str
    )
    def test_the_repetition_penalty(self, dtype):
        """Rows of a wider tensor, and a token that has no logit."""
        logits, state = normal(2, 50).to(dtype)[:, :40], make_state(2, Processors(repetition=True))
        state.selection.sequences[1, 1] = 40
        scores = logits.float().contiguous()
        self.kernels.penalize_triton(
            scores,
            logits,
            state.selection.sequences,
            positions(len(logits)),
            state.repetition_penalty,
        )
        assert torch.equal(scores, process_plain(logits, positions(len(logits)), state))

    @pytest.mark.parametrize("value", [torch.nan, -torch.inf, torch.inf])
    def test_a_row_without_a_distribution_gives_a_token(self, value):
        logits = torch.full((1, 21), value, device=DEVICE)
        kinds = Processors(temperature=True, top_k=True, top_p=True, min_p=True)
        assert 0 <= self.select(logits, exponential(1, 21), make_state(1, kinds)).item() < 21

    def test_a_stride_in_the_last_dim_is_refused(self):
        with pytest.raises(ValueError, match=r"last dim has stride 1, got strides \(1, 2\)"):
            self.select(normal(9, 2).t(), normal(2, 9), make_state(2, Processors()))


@pytest.mark.skipif(DEVICE == "cpu", reason="captures a graph")
@pytest.mark.parametrize(
    "kinds",
    [Processors(temperature=True), Processors(temperature=True, top_k=True, top_p=True), ALL],
    ids=str,
)
def test_a_captured_graph_samples_as_transformers_under_new_numbers(kinds):
    logits = normal(3, 32001, scale=3.0)
    numbers = {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "repetition_penalty": 1.2}
    state, graph = make_state(3, kinds), torch.cuda.CUDAGraph()
    select_sampled(logits, positions(len(logits)), state)  # compiles
    at = positions(len(logits))
    with torch.cuda.graph(graph):
        select_sampled(logits, at, state)
    for name, number in numbers.items():
        getattr(state, name).fill_(number)
    for seed in range(20):
        torch.manual_seed(seed)
        expected = of_transformers(logits, state)[0]
        after = rng_state()
        torch.manual_seed(seed)
        graph.replay()
        assert state.selection.token[:, 0].tolist() == expected.tolist()
        assert torch.equal(rng_state(), after)
        state.selection.unfinished.fill_(True)


PAIRS = [
    Processors(**dict.fromkeys(kinds, True))
    for n in (1, 2)
    for kinds in combinations(Processors._fields, n)
]


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize(
    ("vocabulary", "kinds"),
    [(128256, kinds) for kinds in PAIRS] + [(vocabulary, ALL) for vocabulary in (151936, 262144)],
    ids=str,
)
def test_true_vocabularies_in_bfloat16(vocabulary, kinds):
    """A bfloat16 has about a hundred tokens of equal score at the edge of top_p.

    A slack of 1e-5 is one of them.
    """
    kernels = triton_module("hf_static_kv.kernels.sample_triton")
    numbers = {
        "temperature": 0.8,
        "top_k": 50,
        "top_p": 0.9,
        "repetition_penalty": 1.3,
        "min_length": POSITION + 2,
    }
    for seed in range(3):
        logits = normal(1, vocabulary, seed=seed, scale=3.0).bfloat16()
        alone, state = (make_state(batch, kinds, **numbers) for batch in (1, 2))
        scores = process_plain(
            logits, positions(len(logits)), alone._replace(kinds=kinds._replace(**NO_LIMIT))
        )
        must, may = limits(scores, kinds, state, slack=1e-5)
        must &= scores > -torch.inf
        kept = of_transformers(logits, alone)[1] > -torch.inf
        assert not (must & ~kept).any()
        assert not (kept & ~may).any()
        noise, lowest, highest = probes(scores, must, may)
        kernels.select_sampled_triton(logits.repeat(2, 1), noise, positions(2), *state)
        tokens = state.selection.token[:, 0]
        assert tokens[0] == lowest
        assert may.all() or tokens[1] != highest


class TestChecks:
    def test_rows_that_do_not_fit(self):
        with pytest.raises(ValueError, match=r"logits \(2, 9\) and sequences \(3, 8\) do not fit"):
            select_sampled(normal(2, 9), positions(2), make_state(3, Processors()))

    def test_too_large_a_vocabulary(self):
        with pytest.raises(ValueError, match="takes 1 to 16777216 tokens, got logits of 16777217"):
            select_sampled(
                torch.ones(1, 1).expand(1, 2**24 + 1), positions(1), make_state(1, Processors())
            )

    def test_a_number_of_another_dtype(self):
        state = make_state(1, Processors())._replace(top_p=torch.ones(2))
        with pytest.raises(
            ValueError, match=r"top_p must be \(1,\) torch.float64, got \(2,\) torch.float32"
        ):
            select_sampled(normal(1, 9), positions(1), state)
