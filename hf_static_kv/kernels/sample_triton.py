"""Sampling in Triton. Formulas and shapes are in sample.py.

top_k and top_p each ask for a threshold: the largest t for which the scores >= t reach a target, in
number (k) or in mass (p of the whole mass). A sort of the vocabulary would take longer than all the
rest. Instead a score becomes an integer key of the same order, and each pass finds 4 bits of t. A
pass measures what reaches each of 16 candidates, chunk by chunk of the vocabulary. The next kernel
sums up the chunks and goes on from the largest candidate that reaches the target. Sums run in a
fixed order, so the tokens are the same in every run. Rounding keeps order, so a larger candidate
never measures more. The last pass of top_p also counts the scores that equal each candidate: of
those at the threshold `generate` keeps as many as the mass needs, the highest tokens.

A key has 32 bits. Logits in bfloat16 or float16 that have no penalty need 16 or 20: they are scaled
after the search, where a weight is computed. Scaled scores have the order of their logits. Where two
logits become one score, top_k keeps both or none, as `generate` does.

    scores: [B, V] float32   maxima: [B, N], of them   partials: [passes, B, 16, N]
    lows: [passes + 1, B]   counts: [B, 16, N]   N chunks
    lows[i]: the largest candidate of pass i - 1; after the last pass of a search it is the threshold,
    and the next search starts anew
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_static_kv.kernels.launch_triton import launch, pdl_sync
from hf_static_kv.kernels.select_greedy_triton import select_triton

# of the vocabulary, one program each: about one per multiprocessor of an H200, which has 132
_NUM_CHUNKS = 128
_PENALIZED = 1024  # positions of a sequence in one program
_DIGIT = tl.constexpr(4)  # bits of a pass
_CANDIDATES = tl.constexpr(16)
# Of a key. Two numbers of such a dtype differ by 2^-133 or 2^-24 at least and by 2^-8 or 2^-11 of the
# larger one, and float32 tells their products apart with a factor of 2^-14 or more. Top_k 50 of 128256
# tokens takes 18.4 us with 16 bits, noise and selection included. It took 29.3 with 32, and with pass 0
# in a kernel of its own (H200, 2026-11-19).
_BITS = {torch.bfloat16: 16, torch.float16: 20}
_TINY = tl.constexpr(1e-30)  # a mass: top_p = 0 keeps one score, the largest


@triton.jit
def sample_penalize(
    scores, logits, sequences, positions, penalty, logits_b, sequences_b, positions_b, S, V,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A token that is there twice is written twice, with one value: it comes from the logits."""
    b = tl.program_id(0).to(tl.int64)
    position = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = (position < S) & (position <= tl.load(positions + b * positions_b))
    token = tl.load(sequences + b * sequences_b + position, mask=mask, other=-1)
    factor = tl.load(penalty + b)
    mask = mask & (token >= 0) & (token < V)
    pdl_sync(PDL)
    logit = tl.load(logits + b * logits_b + token, mask=mask, other=0.0).to(tl.float32)
    # torch divides by a number on a GPU as it multiplies by the reciprocal, rounded from float64.
    penalized = logit * tl.where(logit < 0, factor.to(tl.float32), (1.0 / factor).to(tl.float32))
    tl.store(scores + b * V + token, penalized, mask=mask)


@triton.jit
def sample_scale(
    logits, scores, maxima, partials, positions, min_length, eos, temperature,
    logits_b, positions_b, V,
    MIN_LENGTH: tl.constexpr, TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, NUM_EOS: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Logits to scores, which may be one tensor, the maximum of each chunk, and pass 0 of top_k."""
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    v = tl.arange(0, TILE)
    token = chunk * CHUNK + v
    mask = (v < CHUNK) & (token < V)
    pdl_sync(PDL)
    score = tl.load(logits + b.to(tl.int64) * logits_b + token, mask=mask, other=-float("inf")).to(
        tl.float32
    )
    if MIN_LENGTH:
        is_short = tl.load(positions + b * positions_b) + 1 < tl.load(min_length + b)
        end = tl.load(eos + b * NUM_EOS + tl.arange(0, NUM_EOS))
        is_end = tl.max((end[:, None] == token[None, :]).to(tl.int32), 0) != 0
        score = tl.where(is_end & is_short, -float("inf"), score)
    if TEMPERATURE:
        score *= _factor(temperature, b)
    score = tl.where(score == 0, 0.0, score)  # -0.0 equals 0.0, its key would be another
    tl.store(scores + b * V + token, score, mask=mask)
    tl.store(maxima + b * NUM_CHUNKS + chunk, tl.max(score, 0))
    if TOP_K:
        lowest = -(1 << (BITS - 1))
        measure = _measure(_key(score, BITS), mask.to(tl.float32), lowest, BITS - _DIGIT, True)
        place = (b * _CANDIDATES + tl.arange(0, _CANDIDATES)) * NUM_CHUNKS + chunk
        tl.store(partials + place, measure)


@triton.jit
def _factor(temperature, b):
    """torch divides by a number on a GPU as it multiplies by the reciprocal, rounded from float64."""
    return (1.0 / tl.load(temperature + b)).to(tl.float32)


@triton.jit
def _load_chunk(
    scores, maxima, factor, b, V,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Which elements are tokens, their keys, and, scaled, their scores and the largest of the row."""
    v = tl.arange(0, TILE)
    token = tl.program_id(1) * CHUNK + v
    mask = (v < CHUNK) & (token < V)
    score = tl.load(scores + b * V + token, mask=mask, other=-float("inf"))
    maximum = tl.max(tl.load(maxima + b * NUM_CHUNKS + tl.arange(0, NUM_CHUNKS)), 0)
    return mask, _key(score, BITS), score * factor, maximum * factor


@triton.jit
def _key(score, BITS: tl.constexpr):
    """An integer that is larger where the score is, which has no other bits."""
    bits = score.to(tl.int32, bitcast=True) >> (32 - BITS)
    return tl.where(bits < 0, bits ^ ((1 << (BITS - 1)) - 1), bits)


@triton.jit
def _score(key, BITS: tl.constexpr):
    bits = tl.where(key < 0, key ^ ((1 << (BITS - 1)) - 1), key)
    return (bits << (32 - BITS)).to(tl.float32, bitcast=True)


@triton.jit
def _low(
    partials, lows, k, p, b, i, B, V,
    MEASURE: tl.constexpr, NUM_CHUNKS: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """lows[i] from pass i - 1, which measured `MEASURE`; its index, its measure less the target."""
    candidate = tl.arange(0, _CANDIDATES)
    chunk = tl.arange(0, NUM_CHUNKS)
    number = (i - 1) % (BITS // _DIGIT)  # of that pass in its search
    row = partials + ((i - 1) * B + b) * _CANDIDATES * NUM_CHUNKS
    first = partials + ((i - 1 - number) * B + b) * _CANDIDATES * NUM_CHUNKS
    # All loads before the first sum: the sums have barriers, which no load moves across.
    parts = tl.load(row + candidate[:, None] * NUM_CHUNKS + chunk[None, :])
    whole = tl.load(first + chunk)
    before = tl.load(lows + (i - 1) * B + b, mask=number > 0, other=-(1 << (BITS - 1)))
    if MEASURE == "number":
        target = tl.minimum(k, V).to(tl.float32)
    else:
        target = tl.where(
            p < 1, tl.maximum(p.to(tl.float32) * tl.sum(whole, 0), _TINY), float("inf")
        )
    measures = tl.sum(parts, 1)
    chosen = tl.maximum(tl.sum((measures >= target).to(tl.int32), 0) - 1, 0)
    surplus = tl.sum(tl.where(candidate == chosen, measures, 0.0), 0) - target
    return before + (chosen << (BITS - _DIGIT * (number + 1))), chosen, surplus


@triton.jit
def _measure(key, weight, low, bits, IS_FIRST: tl.constexpr):
    """The weight of the keys >= each candidate; candidates: low + j * 2^bits."""
    candidate = tl.arange(0, _CANDIDATES)
    is_divided = IS_FIRST
    if not IS_FIRST:  # in late passes few chunks have a key between the candidates
        is_divided = tl.max(tl.where((key ^ low) >> (bits + _DIGIT) == 0, weight, 0.0), 0) > 0
    if is_divided:
        # Candidates first: a thread then holds all of them for its scores, and adds up before
        # threads exchange sums.
        threshold = low + (candidate << bits)
        measure = tl.sum(tl.where(key[None, :] >= threshold[:, None], weight[None, :], 0.0), 1)
    else:
        measure = tl.sum(tl.where(key >= low, weight, 0.0), 0) + tl.zeros_like(candidate).to(
            tl.float32
        )
    return measure


@triton.jit
def _count(key, mask, low):
    """How many keys of tokens equal each candidate of the last pass, low + j."""
    candidate = tl.arange(0, _CANDIDATES)
    count = tl.zeros_like(candidate)
    if tl.max((mask & ((key ^ low) >> _DIGIT == 0)).to(tl.int32), 0) > 0:
        is_equal = mask[None, :] & (key[None, :] == (low + candidate)[:, None])
        count = tl.sum(is_equal.to(tl.int32), 1)
    return count


@triton.jit
def _within_mass(key, low, surplus, counts, weight, NUM_CHUNKS: tl.constexpr):
    """Which keys top_p keeps: those above `low`, and the last ones of the row that equal it.

    surplus: by how much the mass of the keys >= low exceeds the target
    weight: of a key that equals low
    counts: how many keys of a chunk equal low
    """
    this = tl.program_id(1)
    chunk = tl.arange(0, NUM_CHUNKS)
    count = tl.load(counts + chunk).to(tl.float32)
    before = tl.sum(tl.where(chunk < this, count, 0.0), 0)
    own = tl.sum(tl.where(chunk == this, count, 0.0), 0)
    removed = tl.minimum(tl.floor(surplus / weight), tl.sum(count, 0) - 1)
    is_equal = key == low
    number = tl.zeros_like(key).to(tl.float32) + (before + 1)  # in the row, of those that equal it
    if (before < removed) & (removed < before + own):  # some of this chunk are kept: a scan
        number = before + tl.cumsum(is_equal.to(tl.int32), 0).to(tl.float32)
    return (key > low) | (is_equal & (number > removed))


@triton.jit(do_not_specialize=["i"])
def sample_narrow(
    scores, maxima, partials, lows, counts, temperature, top_k, top_p, i, B, V,
    BEFORE: tl.constexpr, MEASURE: tl.constexpr, IS_SECOND: tl.constexpr,
    TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Pass i, which measures `MEASURE`, after one that measured `BEFORE`."""
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    PASSES: tl.constexpr = BITS // _DIGIT
    factor = 1.0
    if TEMPERATURE:
        factor = _factor(temperature, b)
    if IS_SECOND:
        pdl_sync(PDL)  # the previous kernel wrote the scores
    mask, key, score, maximum = _load_chunk(
        scores, maxima, factor, b, V, NUM_CHUNKS, CHUNK, TILE, BITS
    )
    weight = mask.to(tl.float32) if MEASURE == "number" else tl.exp(score - maximum)
    low = -(1 << (BITS - 1))
    if BEFORE != "nothing":
        k = tl.load(top_k + b)
        p = tl.load(top_p + b)
        if not IS_SECOND:
            pdl_sync(PDL)
        if BEFORE == "mass" and TOP_K:  # what top_k does not keep has no mass
            edge = _score(tl.load(lows + PASSES * B + b), BITS) * factor
            weight = tl.where(score >= edge, weight, 0.0)
        low, _, _ = _low(partials, lows, k, p, b, i, B, V, BEFORE, NUM_CHUNKS, BITS)
        if chunk == 0:
            tl.store(lows + i * B + b, low)
        if BEFORE == "number" and MEASURE == "mass":  # the other search begins
            weight = tl.where(score >= _score(low, BITS) * factor, weight, 0.0)
            low = -(1 << (BITS - 1))
    measure = _measure(key, weight, low, BITS - _DIGIT * (i % PASSES + 1), BEFORE != MEASURE)
    place = (b * _CANDIDATES + tl.arange(0, _CANDIDATES)) * NUM_CHUNKS + chunk
    tl.store(partials + i * B * _CANDIDATES * NUM_CHUNKS + place, measure)
    if BEFORE == "mass":
        is_last = i % PASSES == PASSES - 1
        if is_last:
            tl.store(counts + place, _count(key, mask, low))


@triton.jit(do_not_specialize=["i"])
def sample_draw(
    scores, maxima, noise, partials, lows, counts, temperature, top_k, top_p, min_p,
    quotients, tokens, i, B, V,
    BEFORE: tl.constexpr, TEMPERATURE: tl.constexpr, TOP_K: tl.constexpr, MIN_P: tl.constexpr,
    NUM_CHUNKS: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, BITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(0)
    chunk = tl.program_id(1)
    v = tl.arange(0, TILE)
    # Before the wait: torch wrote it, at least two kernels ago.
    q = tl.load(
        noise + b * V + chunk * CHUNK + v, mask=(v < CHUNK) & (chunk * CHUNK + v < V), other=1.0
    )
    factor = 1.0
    if TEMPERATURE:
        factor = _factor(temperature, b)
    if BEFORE == "nothing":
        pdl_sync(PDL)  # the previous kernel wrote the scores
    mask, key, score, maximum = _load_chunk(
        scores, maxima, factor, b, V, NUM_CHUNKS, CHUNK, TILE, BITS
    )
    weight = tl.exp(score - maximum)
    keep = mask
    if BEFORE != "nothing":
        k = tl.load(top_k + b)
        p = tl.load(top_p + b)
        pdl_sync(PDL)
        if BEFORE == "mass" and TOP_K:
            keep = keep & (score >= _score(tl.load(lows + BITS // _DIGIT * B + b), BITS) * factor)
        low, chosen, surplus = _low(partials, lows, k, p, b, i, B, V, BEFORE, NUM_CHUNKS, BITS)
        edge = _score(low, BITS) * factor
        if BEFORE == "mass":
            row = counts + (b * _CANDIDATES + chosen) * NUM_CHUNKS
            own = tl.exp(edge - maximum)
            keep = keep & _within_mass(key, low, surplus, row, own, NUM_CHUNKS)
        else:
            keep = keep & ((score >= edge) | (score == maximum))
    if MIN_P:
        keep = keep & (weight >= tl.load(min_p + b).to(tl.float32))
    quotient = tl.div_rn(weight, q)
    # Below every quotient: what is not kept and NaN, and lower yet what is no token.
    quotient = tl.where(keep & (quotient >= 0), quotient, tl.where(mask, -1.0, -2.0))
    largest, index = tl.max(quotient, 0, return_indices=True)
    tl.store(quotients + b * NUM_CHUNKS + chunk, largest)
    tl.store(tokens + b * NUM_CHUNKS + chunk, chunk * CHUNK + index)


def select_sampled_triton(
    logits: Tensor, noise: Tensor, positions: Tensor, selection: Any, kinds: Any,
    temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, penalty: Tensor, min_length: Tensor,
) -> None:  # fmt: skip
    """The arguments from `selection` on: the fields of `SampleState`, in their order."""
    if logits.stride(1) != 1:
        raise ValueError(
            f"Sampling needs logits whose last dim has stride 1, got strides {logits.stride()}."
        )
    batch, vocabulary = logits.shape
    # What a penalty has rounded has all bits of float32.
    bits = 32 if kinds.repetition else _BITS.get(logits.dtype, 32)
    each = bits // _DIGIT.value
    passes = ["number"] * each * kinds.top_k + ["mass"] * each * kinds.top_p
    scores, partials, maxima, quotients, tokens, lows, counts = _buffers(logits, len(passes))
    # So that a thread loads 16 bytes of bfloat16 at once.
    chunk = 8 * triton.cdiv(vocabulary, 8 * _NUM_CHUNKS)
    tile = triton.next_power_of_2(chunk)
    chunks = {
        "NUM_CHUNKS": _NUM_CHUNKS, "CHUNK": chunk, "TILE": tile, "BITS": bits,
        "num_warps": min(max(tile // 256, 1), 16),  # 8 scores a thread
    }  # fmt: skip
    grid = (batch, _NUM_CHUNKS)
    numbers = positions, min_length, selection.eos, temperature

    def scale(logits: Tensor, **own: bool) -> None:
        launch(
            sample_scale, grid, logits, scores, maxima, partials, *numbers, logits.stride(0),
            positions.stride(0), vocabulary, NUM_EOS=selection.eos.shape[1], **own, **chunks,
        )  # fmt: skip

    if kinds.repetition:  # on a copy in float32
        scale(logits, MIN_LENGTH=False, TEMPERATURE=False, TOP_K=False)
        penalize_triton(scores, logits, selection.sequences, positions, penalty)
        logits = scores
    is_early = kinds.temperature and bits == 32
    scale(logits, MIN_LENGTH=kinds.min_length, TEMPERATURE=is_early, TOP_K=kinds.top_k)
    chunks |= {"TEMPERATURE": kinds.temperature and not is_early, "TOP_K": kinds.top_k}
    chunks["enable_fp_fusion"] = False  # an FMA would not round a scaled score
    before = ["nothing", *passes]
    begin = int(kinds.top_k)  # pass 0 has run
    for i in range(begin, len(passes)):
        launch(
            sample_narrow, grid, scores, maxima, partials, lows, counts, temperature, top_k, top_p,
            i, batch, vocabulary, BEFORE=before[i], MEASURE=passes[i], IS_SECOND=i == begin, **chunks,
        )  # fmt: skip
    launch(
        sample_draw, grid, scores, maxima, noise, partials, lows, counts, temperature, top_k, top_p,
        min_p, quotients, tokens, len(passes), batch, vocabulary,
        BEFORE=before[-1], MIN_P=kinds.min_p, **chunks,
    )  # fmt: skip
    select_triton(quotients, tokens, vocabulary, positions, *selection)


def _buffers(logits: Tensor, passes: int) -> tuple[Tensor, ...]:
    """scores, partials, maxima, quotients, tokens, lows, counts."""
    batch = len(logits)
    chunks = (batch, _NUM_CHUNKS)
    candidates = (batch, _CANDIDATES.value, _NUM_CHUNKS)
    floats = logits.shape, (passes, *candidates), chunks, chunks
    integers = chunks, (passes + 1, batch), candidates
    return (
        *(logits.new_empty(shape, dtype=torch.float32) for shape in floats),
        *(logits.new_empty(shape, dtype=torch.int32) for shape in integers),
    )


def penalize_triton(
    scores: Tensor, logits: Tensor, sequences: Tensor, positions: Tensor, penalty: Tensor
) -> None:
    """Write the penalized logits of the tokens of a sequence, up to `positions` [B]."""
    batch, vocabulary = logits.shape
    length = sequences.shape[1]
    launch(
        sample_penalize, (batch, triton.cdiv(length, _PENALIZED)), scores, logits, sequences,
        positions, penalty, logits.stride(0), sequences.stride(0), positions.stride(0),
        length, vocabulary, TILE=_PENALIZED, num_warps=4,
    )  # fmt: skip
