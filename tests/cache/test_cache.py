"""The cache on buffers small enough to draw, with no model: every value is written by hand."""

import copy
import os
import pickle
import sys
import weakref
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from hf_static_kv import StaticContiguousCache, StaticContiguousLayer
from hf_static_kv.cache.storage import LayerShape, allocate_groups


def make(num_layers=2, heads=1, dim=1, room=8, batch=1, windows=None, **kwargs):
    return StaticContiguousCache.allocate(
        num_layers,
        heads,
        dim,
        room,
        batch_size=batch,
        dtype=torch.float32,
        device="cpu",
        sliding_windows=windows,
        **kwargs,
    )


def states(*numbers, batch=1, heads=1, dim=1):
    """One token for each number, the same in every row, head and dim:

    [batch, heads, tokens, dim].
    """
    return (
        torch.tensor(numbers, dtype=torch.float32).view(1, 1, -1, 1).expand(batch, heads, -1, dim)
    )


def step(cache, *numbers, batch=1):
    """A forward pass:

    every layer writes the same tokens; values are the keys negated. Returns the views.
    """
    return [
        cache.update(states(*numbers, batch=batch), -states(*numbers, batch=batch), i)
        for i in range(len(cache))
    ]


def text(layer):
    """The keys of row 0 as a list."""
    return layer.keys[0, 0, :, 0].tolist()


class TestAllocation:
    def test_shape_dtype_zeros_and_length(self):
        cache = StaticContiguousCache.allocate(2, 4, 8, 16, dtype=torch.float16, device="cpu")
        for storage in (cache.key_storage, cache.value_storage):
            assert list(storage.shape) == [2, 1, 4, 16, 8]
            assert storage.dtype == torch.float16
            assert storage.is_contiguous()
            assert not storage.any()
        assert cache.seq_len == 0
        assert cache.max_cache_len == 16

    def test_dtype_and_device_default_to_torchs_own(self):
        cache = StaticContiguousCache.allocate(
            num_layers=2, num_kv_heads=4, head_dim=8, max_cache_len=16
        )
        assert cache.key_storage.dtype == torch.get_default_dtype()
        assert cache.key_storage.device == torch.get_default_device()

    def test_memory_bytes(self):
        cache = make(num_layers=3, heads=4, dim=8, room=16, batch=2)
        assert cache.memory_bytes == 2 * 3 * 2 * 4 * 16 * 8 * 4

    def test_nothing_is_allocated_before_the_first_update(self):
        cache = StaticContiguousCache(LlamaConfig(num_hidden_layers=2), max_cache_len=8)
        assert cache.memory_bytes == 0
        assert cache.layers[0].keys is None
        with pytest.raises(ValueError, match="first forward pass"):
            _ = cache.key_storage
        step(cache, 1, 2)  # one head of dim 1, unlike the config: the states decide
        assert list(cache.key_storage.shape) == [2, 1, 1, 8, 1]

    def test_keys_and_values_of_unlike_dim(self):
        cache = make(heads=2, dim=4, value_head_dim=6)
        keys, values = cache.update(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 6), 0)
        assert keys.shape[-1] == 4
        assert values.shape[-1] == 6
        assert list(cache.value_storage.shape) == [2, 1, 2, 8, 6]

    def test_layers_of_unlike_shape_form_groups(self):
        """Layers 0, 2 and 3 have two heads, layer 1 has one: two pairs of tensors."""
        cache = make(num_layers=4, heads=[2, 1, 2, 2], dim=4)
        assert [list(group.keys.shape) for group in cache.storage_groups] == [
            [3, 1, 2, 8, 4],
            [1, 1, 1, 8, 4],
        ]
        assert cache.memory_bytes == sum(group.num_bytes for group in cache.storage_groups)
        for layer_idx, heads in enumerate([2, 1, 2, 2]):
            cache.update(
                torch.full((1, heads, 3, 4), float(layer_idx)),
                torch.ones(1, heads, 3, 4),
                layer_idx,
            )
        assert [layer.keys.unique().item() for layer in cache.layers] == [0, 1, 2, 3]
        with pytest.raises(ValueError, match="2 groups"):
            _ = cache.key_storage

    def test_a_layer_unlike_the_first_gets_storage_of_its_own(self, caplog):
        """The config says that layers are alike, the states say otherwise:

        nothing is lost, and it is said.
        """
        cache = StaticContiguousCache(LlamaConfig(num_hidden_layers=3), max_cache_len=8)
        for layer_idx, dim in enumerate([4, 6, 6]):
            cache.update(
                torch.full((1, 1, 2, dim), layer_idx + 1.0), torch.ones(1, 1, 2, dim), layer_idx
            )
        assert [list(layer.keys.shape) for layer in cache.layers] == [
            [1, 1, 2, 4],
            [1, 1, 2, 6],
            [1, 1, 2, 6],
        ]
        assert [layer.keys.unique().item() for layer in cache.layers] == [1, 2, 3]
        assert (
            "Layer 1 has 1 KV heads of dim 6 on cpu, unlike the config and the first layer"
            in caplog.text
        )

    def test_layers_that_have_written_keep_their_storage_when_a_later_one_has_another_shape(self):
        cache = StaticContiguousCache(LlamaConfig(num_hidden_layers=4), max_cache_len=8)
        for layer_idx, dim in enumerate([4, 4, 6, 6]):
            cache.update(
                torch.full((1, 1, 2, dim), layer_idx + 1.0), torch.ones(1, 1, 2, dim), layer_idx
            )
        assert [layer.keys.unique().item() for layer in cache.layers] == [1, 2, 3, 4]

    def test_after_the_first_step_the_shape_is_settled(self):
        cache = StaticContiguousCache(LlamaConfig(num_hidden_layers=2), max_cache_len=8)
        step(cache, 1, 2)
        cache.reset()
        for layer_idx in (0, 1):
            with pytest.raises(
                ValueError,
                match="1 KV heads of dim 3, this layer was allocated for 1 KV heads of dim 1",
            ):
                cache.update(torch.ones(1, 1, 1, 3), torch.ones(1, 1, 1, 3), layer_idx)

    def test_early_initialization(self):
        """transformers' own call for allocating in advance."""
        cache = StaticContiguousCache(LlamaConfig(num_hidden_layers=2), max_cache_len=8)
        cache.early_initialization(3, 2, 4, torch.float32, torch.device("cpu"))
        assert list(cache.key_storage.shape) == [2, 3, 2, 8, 4]
        assert not cache.is_initialized  # models read that as 'the prompt has been seen'


class TestLargeStorageOnCPU:
    """The system zeroes it when it is first touched."""

    @pytest.mark.skipif(
        not sys.platform.startswith("linux"), reason="reads the resident memory from /proc"
    )
    def test_free_positions_take_no_memory(self):
        before = resident_bytes()
        cache = make(heads=4, dim=64, room=1 << 19)
        assert cache.memory_bytes == 2 << 30
        for layer_idx in (0, 1):
            cache.update(torch.rand(1, 4, 3, 64), torch.rand(1, 4, 3, 64), layer_idx)
        assert resident_bytes() - before < 100 << 20

    def test_it_is_zero_aligned_and_writable(self):
        """As what torch allocates: the bits of a product may depend on how its input is aligned."""
        cache = make(heads=3, dim=7, room=1 << 17)
        for storage in (cache.key_storage, cache.value_storage):
            assert storage.is_contiguous()
            assert storage.data_ptr() % 64 == 0
            assert storage.untyped_storage().nbytes() == storage.nbytes
            assert not storage.any()
        numbers = torch.rand(1, 3, 5, 7)
        for layer_idx in (0, 1):
            for written, kept in zip(
                (numbers, -numbers), cache.update(numbers, -numbers, layer_idx), strict=True
            ):
                assert torch.equal(written, kept)


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class TestNoMemory:
    """The allocator fails: what was wanted and what helps is said, and nothing stays allocated."""

    WANTED = (
        r"max_cache_len=8 with batch_size=3 in torch.float32 takes 1,536 bytes on cpu"
        r".*shorter max_cache_len, a smaller"
    )

    def failing_zeros(self, monkeypatch, at_call, error):
        alive, real = [], torch.zeros

        def zeros(*args, **kwargs):
            if len(alive) + 1 == at_call:
                raise error
            tensor = real(*args, **kwargs)
            alive.append(weakref.ref(tensor))
            return tensor

        monkeypatch.setattr(torch, "zeros", zeros)
        return alive

    @pytest.mark.parametrize("at_call", [1, 2, 3, 4])
    @pytest.mark.parametrize("kind", [RuntimeError, torch.OutOfMemoryError])
    def test_all_or_nothing(self, monkeypatch, at_call, kind):
        alive = self.failing_zeros(
            monkeypatch, at_call, kind("DefaultCPUAllocator: not enough memory")
        )
        with pytest.raises(kind, match=self.WANTED) as raised:
            make(heads=[1, 2], batch=3, dim=[4, 2])
        assert type(raised.value) is kind
        assert isinstance(raised.value.__cause__, kind)
        assert [tensor() for tensor in alive] == [None] * (at_call - 1)

    def test_at_the_first_forward_pass(self, monkeypatch):
        cache = StaticContiguousCache(LlamaConfig(num_hidden_layers=2), max_cache_len=8)
        with monkeypatch.context() as patch:
            self.failing_zeros(patch, 2, RuntimeError("DefaultCPUAllocator: not enough memory"))
            with pytest.raises(
                RuntimeError, match=r"batch_size=1 in torch.float32 takes 128 bytes on cpu"
            ):
                step(cache, 1, 2)
        assert cache.memory_bytes == 0
        step(cache, 1, 2)  # once there is memory, the same pass goes on
        assert cache.seq_len == 2

    def test_a_true_failure(self):
        with pytest.raises(RuntimeError, match=r"takes 32,000,000,000,000,000 bytes on cpu"):
            make(heads=4, dim=1, room=10**15 // 2)

    def test_other_errors_are_left_as_they_are(self, monkeypatch):
        self.failing_zeros(monkeypatch, 1, RuntimeError("a device error"))
        with pytest.raises(RuntimeError, match=r"^a device error$"):
            make()

    def test_what_would_fit_on_a_gpu(self, monkeypatch):
        """2 layers of 2 heads of dim 4 in float16 take 64 bytes a position and row; 4,000 are free
        or reserved.
        """
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3_000, 80_000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5_000)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 4_000)
        self.failing_zeros(monkeypatch, 1, torch.OutOfMemoryError("CUDA out of memory"))
        cuda = torch.device("cuda:0")
        with pytest.raises(
            torch.OutOfMemoryError,
            match=r"takes 6,400 bytes on cuda:0, where 4,000 are free.*=62 would",
        ):
            allocate_groups(
                [(LayerShape(2, 4, 4), cuda, [0, 1])], 100, 1, (torch.float16, torch.float16)
            )


class TestUpdate:
    def test_update_and_advance_by_hand(self):
        """
        update layer 0   [1 2 3 4 . . . .]   view 1 2 3 4       seq_len 0, and 4 after advance(4)
        update layer 0   [1 2 3 4 5 . . .]   view 1 2 3 4 5     seq_len 4, and 5 after advance(1)
        """
        cache = make()
        keys, values = cache.update(states(1, 2, 3, 4), states(-1, -2, -3, -4), 0)
        assert keys.flatten().tolist() == [1, 2, 3, 4]
        assert cache.seq_len == 0
        cache.advance(4)
        assert cache.seq_len == 4
        keys, values = cache.update(states(5), states(-5), 0)
        assert keys.flatten().tolist() == [1, 2, 3, 4, 5]
        assert values.flatten().tolist() == [-1, -2, -3, -4, -5]
        cache.advance(1)
        assert cache.seq_len == 5

    @pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 0, 2), (2, 1, 0)])
    def test_the_length_moves_when_all_layers_have_written(self, order):
        cache = make(num_layers=3)
        for tokens in (2, 3):
            for layer_idx in order:
                assert cache.seq_len == tokens - (2 if tokens == 2 else 1)
                numbers = range(cache.seq_len, tokens)
                cache.update(states(*numbers), states(*numbers), layer_idx)
            assert cache.seq_len == tokens
            assert [text(layer) for layer in cache.layers] == [list(range(tokens))] * 3
        assert isinstance(cache.get_seq_length(), int)

    def test_views_are_slices_of_the_storage(self):
        cache = make()
        step(cache, 1, 2, 3)
        (keys, values), _ = step(cache, 4)
        assert keys.data_ptr() == cache.key_storage.data_ptr()
        assert values.data_ptr() == cache.value_storage.data_ptr()

    def test_layers_do_not_see_each_other(self):
        cache = make()
        cache.update(states(1, 2), states(3, 4), 0)
        cache.update(states(5, 6), states(7, 8), 1)
        assert [text(layer) for layer in cache.layers] == [[1, 2], [5, 6]]
        assert cache.value_storage[:, 0, 0, :2, 0].tolist() == [[3, 4], [7, 8]]

    def test_a_sliding_view_starts_at_the_oldest_visible_position(self):
        """
        window 3, text    1 2 3 4 5         queries        the oldest sees
        prefill 1 2 3 4   view 1 2 3 4      0 1 2 3        position 0
        decode 5          view 3 4 5        4              position 2
        prefill 6 7       view 4 5 6 7      5 6            position 3
        """
        cache = make(windows=[3, None])
        seen = [step(cache, *numbers) for numbers in ((1, 2, 3, 4), (5,), (6, 7))]
        assert [views[0][0].flatten().tolist() for views in seen] == [
            [1, 2, 3, 4],
            [3, 4, 5],
            [4, 5, 6, 7],
        ]
        assert [views[1][0].numel() for views in seen] == [4, 5, 7]
        assert cache.is_sliding == [True, False]

    @pytest.mark.parametrize("window", [1, 2, 3, 100])
    def test_mask_sizes_say_what_the_view_covers(self, window):
        cache = make(windows=[window, None])
        for numbers in ((1, 2, 3), (4,), (5, 6), (7,)):
            sizes = [cache.get_mask_sizes(len(numbers), layer_idx) for layer_idx in (0, 1)]
            views = step(cache, *numbers)
            for (kv_length, kv_offset), (keys, _) in zip(sizes, views, strict=True):
                assert keys.flatten().tolist() == list(
                    range(kv_offset + 1, kv_offset + kv_length + 1)
                )

    def test_a_cache_of_one(self):
        cache = make(num_layers=1, room=1)
        step(cache, 7)
        assert text(cache.layers[0]) == [7]
        with pytest.raises(ValueError, match="holds 1 of at most 1"):
            step(cache, 8)

    def test_a_layer_alone(self):
        """The layer class is public: used by itself it allocates and advances by itself."""
        layer = StaticContiguousLayer(max_cache_len=4, sliding_window=2)
        layer.update(states(1, 2, 3), states(1, 2, 3))
        keys, _ = layer.update(states(4), states(4))
        assert keys.flatten().tolist() == [3, 4]
        assert text(layer) == [1, 2, 3, 4]


class TestText:
    def test_crop_is_exact_beyond_a_window(self):
        """Window 3:

        the text shrinks from 6 to 2 and grows again, and the view still has all that it should.
        """
        cache = make(windows=[3, 3])
        for number in (1, 2, 3, 4, 5, 6):
            step(cache, number)
        before = cache.key_storage.clone()
        cache.crop(-4)
        assert torch.equal(cache.key_storage, before)
        assert step(cache, 30)[0][0].flatten().tolist() == [1, 2, 30]

    def test_crop_zero_is_nothing(self):
        cache = make()
        step(cache, 1, 2)
        cache.crop(0)
        assert cache.seq_len == 2

    def test_a_crop_counted_by_a_tensor_leaves_an_int(self):
        """transformers 5.17 counts the tokens that assisted decoding takes back with a tensor."""
        cache = make()
        step(cache, 1, 2, 3)
        cache.crop(torch.tensor(-2))
        assert [type(layer.length) for layer in cache.layers] == [int, int]
        step(cache, 4)
        assert [text(layer) for layer in cache.layers] == [[1, 4]] * 2

    def test_reset_keeps_storage_and_address(self):
        cache = make()
        step(cache, 1, 2)
        before, address = cache.key_storage.clone(), cache.key_storage.data_ptr()
        cache.reset()
        assert cache.seq_len == 0
        assert cache.key_storage.data_ptr() == address
        assert torch.equal(cache.key_storage, before)

    def test_a_deep_copy_shares_nothing(self):
        cache = make()
        step(cache, 1, 2)
        copied = copy.deepcopy(cache)
        step(copied, 3)
        assert [text(layer) for layer in copied.layers] == [[1, 2, 3]] * 2
        assert copied.key_storage[0, 0, 0, 2, 0] == 3
        assert cache.seq_len == 2
        assert cache.key_storage[0, 0, 0, 2, 0] == 0

    @pytest.mark.parametrize("how", ["deepcopy", "deepcopy in inference mode", "pickle"])
    def test_a_copy_is_whole_and_writes_into_its_own_storage(self, how):
        cache = make(windows=[2, None])
        step(cache, 1, 2)
        with torch.inference_mode("inference" in how):
            copied = pickle.loads(pickle.dumps(cache)) if how == "pickle" else copy.deepcopy(cache)
        step(copied, 3)
        copied.crop(-1)
        step(copied, 4)
        copied.layers[0].keys[:] *= 2
        assert [text(layer) for layer in copied.layers] == [[2, 4, 8], [1, 2, 4]]
        assert copied.key_storage[:, 0, 0, :3, 0].tolist() == [[2, 4, 8], [1, 2, 4]]
        assert [text(layer) for layer in cache.layers] == [[1, 2]] * 2

    @pytest.mark.parametrize("tokens", [0, 3])
    def test_a_pickle_holds_the_tokens_and_not_the_room(self, tokens):
        cache = make(heads=2, dim=8, room=4096, batch=4)
        if tokens:
            numbers = torch.rand(2, 2, tokens, 8)
            for layer_idx in (0, 1):
                cache.update(numbers + layer_idx, -numbers, layer_idx)
        assert cache.memory_bytes == 2 * 2 * 4 * 2 * 4096 * 8 * 4
        pickled = pickle.dumps(cache)
        assert len(pickled) < 8_000 + 2 * 2 * 2 * 2 * tokens * 8 * 4
        loaded = pickle.loads(pickled)
        assert loaded.key_storage.shape == cache.key_storage.shape
        assert torch.equal(loaded.key_storage, cache.key_storage)
        assert torch.equal(loaded.value_storage, cache.value_storage)
        assert (loaded.seq_len, loaded.batch_size) == (cache.seq_len, cache.batch_size)

    @pytest.mark.parametrize("how", ["deepcopy", "pickle"])
    def test_a_copy_of_a_shallow_copy_is_whole(self, how):
        cache = copy.copy(make())
        step(cache, 1, 2)
        copied = pickle.loads(pickle.dumps(cache)) if how == "pickle" else copy.deepcopy(cache)
        assert [text(layer) for layer in copied.layers] == [[1, 2]] * 2

    def test_a_pickle_holds_a_step_in_progress(self):
        cache = make()
        step(cache, 1, 2)
        cache.update(states(3), states(-3), 0)
        loaded = pickle.loads(pickle.dumps(cache))
        loaded.update(states(3), states(-3), 1)
        assert [text(layer) for layer in loaded.layers] == [[1, 2, 3]] * 2

    def test_a_pickle_holds_a_text_half_replaced(self):
        cache = make()
        step(cache, 1, 2, 3)
        cache.layers[0].keys = states(7)
        loaded = pickle.loads(pickle.dumps(cache)).layers[0]
        assert text(loaded) == [7]
        assert loaded.values.flatten().tolist() == [-1, -2, -3]


class TestBatch:
    def rows(self, cache):
        return cache.layers[1].keys[:, 0, :, 0].tolist()

    def three_rows(self):
        """row 0: 0 10, row 1: 1 11, row 2: 2 12, in a storage of four rows."""
        cache = make(batch=4)
        keys = torch.tensor([[0.0, 10], [1, 11], [2, 12]]).view(3, 1, 2, 1)
        for layer_idx in (0, 1):
            cache.update(keys, -keys, layer_idx)
        assert cache.batch_size == 3
        return cache

    def test_reorder(self):
        cache = self.three_rows()
        address = cache.key_storage.data_ptr()
        cache.reorder_cache(torch.tensor([2, 0, 0]))
        assert self.rows(cache) == [[2, 12], [0, 10], [0, 10]]
        assert cache.layers[0].values[:, 0, 1, 0].tolist() == [-12, -10, -10]
        assert cache.key_storage.data_ptr() == address

    def test_select(self):
        cache = self.three_rows()
        cache.batch_select_indices(torch.tensor([2, 1]))
        assert self.rows(cache) == [[2, 12], [1, 11]]
        cache.batch_select_indices(torch.tensor([False, True]))
        assert self.rows(cache) == [[1, 11]]

    def test_repeat(self):
        cache = self.three_rows()
        cache.batch_select_indices(torch.tensor([0, 2]))
        cache.batch_repeat_interleave(2)
        assert self.rows(cache) == [[0, 10], [0, 10], [2, 12], [2, 12]]

    def test_a_smaller_batch_uses_the_first_rows(self):
        cache = self.three_rows()
        assert cache.key_storage[0, :, 0, 0, 0].tolist() == [0, 1, 2, 0]
        cache.reset()
        step(cache, 5, batch=2)
        assert cache.key_storage[0, :, 0, 0, 0].tolist() == [5, 5, 2, 0]
        assert cache.batch_size == 2


class TestAssignment:
    """Other libraries write `layer.keys = ...`:

    a prefix view sets the length, anything else is copied in.
    """

    def filled(self):
        cache = make(batch=2)
        step(cache, 1, 2, 3, 4, batch=2)
        return cache

    def test_a_prefix_view_sets_the_length(self):
        cache = self.filled()
        before = cache.key_storage.clone()
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, :2], layer.values[:, :, :2]
        assert cache.seq_len == 2
        assert torch.equal(cache.key_storage, before)
        assert step(cache, 9, batch=2)[1][0][0].flatten().tolist() == [1, 2, 9]

    def test_another_tensor_is_copied_in(self):
        cache = self.filled()
        address = cache.key_storage.data_ptr()
        for layer in cache.layers:
            layer.keys, layer.values = states(7, 8, batch=2), states(-7, -8, batch=2)
        assert cache.seq_len == 2
        assert cache.key_storage.data_ptr() == address
        assert cache.key_storage[:, 1, 0, :4, 0].tolist() == [[7, 8, 3, 4]] * 2

    def test_an_overlapping_view_is_copied_as_it_was(self):
        """Dropping the first token: source and target overlap in the storage."""
        cache = self.filled()
        layer = cache.layers[0]
        layer.keys = layer.keys[:, :, 1:]
        assert text(layer) == [2, 3, 4]

    @pytest.mark.parametrize("first", ["keys", "values"])
    @pytest.mark.parametrize(
        "change", [lambda t: t[:, :, -3:], lambda t: t[:, :, 1:], lambda t: t[[1]]], ids=range(3)
    )
    def test_one_after_the_other(self, first, change):
        """On two lines, each from its own old content:

        after the first, the other still reads as it was.
        """
        cache = self.filled()
        layer = cache.layers[0]
        expected = change(layer.keys.clone()), change(layer.values.clone())
        for name in (first, "values" if first == "keys" else "keys"):
            setattr(layer, name, change(getattr(layer, name)))
        assert torch.equal(layer.keys, expected[0])
        assert torch.equal(layer.values, expected[1])
        assert layer.get_seq_length() == expected[0].shape[2]

    def test_appending_by_assignment(self):
        layer = self.filled().layers[0]
        layer.keys = torch.cat([layer.keys, states(5, batch=2)], dim=2)
        layer.values = torch.cat([layer.values, states(-5, batch=2)], dim=2)
        assert text(layer) == [1, 2, 3, 4, 5]
        assert layer.values[0, 0, :, 0].tolist() == [-1, -2, -3, -4, -5]

    def test_none_empties(self):
        cache = self.filled()
        for layer in cache.layers:
            layer.keys = layer.values = None
        assert cache.seq_len == 0

    def test_fewer_rows(self):
        cache = self.filled()
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:1], layer.values[:1]
        assert cache.batch_size == 1
        step(cache, 5)
