"""A `PagedCache` in a file: saved, restored, and continued as if nothing had happened."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import DynamicCache

from hf_paged import CacheFileError, ConfigurationError, PagedCache
from hf_paged.compat import cache_argument
from tests.cache.test_paged_cache import forward, tokens_of
from tests.families import tiny_model


def filled(dtype: torch.dtype = torch.float32, length: int = 21) -> PagedCache:
    model = tiny_model("llama", dtype)
    cache = PagedCache(model.config, block_size=8)
    forward(model, tokens_of(2, length), cache)
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_saved_is_restored_bit_by_bit(tmp_path, dtype):
    cache, path = filled(dtype), tmp_path / "prefix.safetensors"
    cache.save(path)
    restored = PagedCache.load(path, device="cpu")
    assert restored.block_size == 8 and restored.num_blocks_held == restored.num_blocks == 6
    for left, right in zip(restored.layers, cache.layers, strict=True):
        assert left.keys.dtype == dtype
        assert torch.equal(left.keys, right.keys) and torch.equal(left.values, right.values)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "deepseek_v3"])
def test_generate_goes_on_from_a_restored_cache(tmp_path, family):
    """huggingface/transformers#24841: a cache that can be kept and given to a later `generate`."""
    model, tokens = tiny_model(family), tokens_of(2, 30)
    expected = model.generate(tokens, max_new_tokens=9)
    cache = PagedCache(model.config)
    forward(model, tokens[:, :-1], cache)
    cache.save(tmp_path / "cache")
    for _ in range(2):  # a file serves as often as wanted
        restored = PagedCache.load(tmp_path / "cache")
        assert torch.equal(model.generate(tokens, max_new_tokens=9, **{cache_argument(model): restored}), expected)


def test_shared_blocks_are_in_the_file_once_and_shared_again(tmp_path):
    model, cache = tiny_model("llama"), filled(length=20)
    cache.batch_repeat_interleave(3)
    (fork,) = cache.fork()
    forward(model, tokens_of(6, 40), cache)  # is not in the fork's file
    fork.save(tmp_path / "fork")
    with safe_open(tmp_path / "fork", framework="pt") as file:
        assert file.get_slice("layers.0.keys").get_shape() == [2, 6 * 8, 16]
    restored = PagedCache.load(tmp_path / "fork")
    assert restored.num_blocks_held == 6 and restored.batch_size == 6
    reference = DynamicCache()
    forward(model, tokens_of(2, 20), reference)
    reference.batch_repeat_interleave(3)
    for seed in range(2):  # rows part in a block that they shared
        new = tokens_of(6, 3, seed=seed)
        torch.testing.assert_close(forward(model, new, restored), forward(model, new, reference), atol=1e-5, rtol=1e-5)


def test_cropped_tokens_are_not_in_the_file(tmp_path):
    cache = PagedCache(block_size=8)
    cache.update(torch.ones(1, 1, 13, 2), torch.ones(1, 1, 13, 2), 0)
    cache.crop(-3)
    cache.save(tmp_path / "cache")
    with safe_open(tmp_path / "cache", framework="pt") as file:
        assert file.get_tensor("layers.0.keys").sum() == 2 * 10
    assert cache.layers[0].tables.store.layers[0][0].sum() == 2 * 13  # the cache itself was not touched


def test_empty_cache_is_restored_as_one(tmp_path):
    model = tiny_model("llama")
    PagedCache(model.config, block_size=4).save(tmp_path / "cache")
    cache = PagedCache.load(tmp_path / "cache")
    assert cache.get_seq_length() == 0 and cache.block_size == 4 and len(cache.layers) == 2
    tokens = tokens_of(2, 9)
    torch.testing.assert_close(
        forward(model, tokens, cache), forward(model, tokens, DynamicCache()), atol=1e-5, rtol=1e-5
    )


def test_cache_with_gradients_can_be_saved(tmp_path):
    model = tiny_model("llama")
    cache = PagedCache(model.config)
    model(tokens_of(1, 9), use_cache=True, **{cache_argument(model): cache})
    cache.save(tmp_path / "cache")
    assert torch.equal(PagedCache.load(tmp_path / "cache").layers[1].values, cache.layers[1].values)


def test_cache_loaded_in_inference_mode_continues_outside(tmp_path):
    model, cache = tiny_model("llama"), filled(length=9)
    cache.save(tmp_path / "cache")
    with torch.inference_mode():
        restored = PagedCache.load(tmp_path / "cache")
        forward(model, tokens_of(2, 2), restored)
    forward(model, tokens_of(2, 2), cache)
    with torch.enable_grad():
        logits = [
            model(tokens_of(2, 3), use_cache=True, **{cache_argument(model): each}).logits for each in (restored, cache)
        ]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-5, rtol=1e-5)


def test_failed_save_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    path = tmp_path / "cache"
    filled(length=5).save(path)
    before = path.read_bytes()

    def half(tensors, name, metadata):
        with open(name, "wb") as file:
            file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr("hf_paged.cache.cache_file.save_file", half)
    with pytest.raises(OSError, match="No space left"):
        filled(length=9).save(path)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_folder_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(OSError, match="nowhere"):
        filled(length=3).save(tmp_path / "nowhere" / "cache")
    with pytest.raises(FileNotFoundError):
        PagedCache.load(tmp_path / "nowhere")


@pytest.mark.parametrize("device", ["cuda", torch.device("cuda", 5), "cud", "", "meta", None])
def test_a_device_that_is_not_there_is_named(tmp_path, monkeypatch, device):
    def no_gpu(*size, device):
        if device.type == "cuda":
            raise AssertionError("Torch not compiled with CUDA enabled")
        return real(*size, device=device)

    path, real = tmp_path / "cache", torch.zeros
    filled(length=3).save(path)
    monkeypatch.setattr("hf_paged.cache.cache_file.torch.zeros", no_gpu)
    with pytest.raises(ConfigurationError, match=rf"`device` '{device}'.*(model\.device|model's own)"):
        PagedCache.load(path, device=device)


def test_the_cpu_by_its_number_is_the_cpu(tmp_path):
    cache = filled(length=3)
    cache.save(tmp_path / "cache")
    assert PagedCache.load(tmp_path / "cache", device="cpu:0").get_seq_length() == cache.get_seq_length()


def test_truncated_file_is_refused(tmp_path):
    path = tmp_path / "cache"
    filled().save(path)
    whole = path.read_bytes()
    for size in (0, 5, 300, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CacheFileError, match="incomplete"):
            PagedCache.load(path)


def test_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "weights"
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(CacheFileError, match="not a saved PagedCache"):
        PagedCache.load(path)
    with pytest.raises(CacheFileError, match="is a folder"):
        PagedCache.load(tmp_path)
    path.write_text("not even that")
    with pytest.raises(CacheFileError, match="no safetensors file"):
        PagedCache.load(path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("version", "2", "version '2'"),
        ("format", "other", "not a saved PagedCache"),
        ("block_size", "0", "block_size"),
        ("block_size", "16", "block ids in each row"),
        ("block_size", "[", "lacks a part"),
        ("tables", None, "lacks a part"),
        ("tables", "[" * 100_000, "lacks a part"),
        ("tables", "[[0, 1, 2], [3, 4]]", "block ids in each row"),
        ("tables", "[[0, 1, 2], [3, 4, 9]]", "number its blocks"),
        ("tables", "[[0, 1, 2], [3, 4, -1]]", "block ids in each row"),
        ("tables", "7", "list of rows"),
        ("tables", "[]", "no blocks"),
        ("tables", "[[0, 1, 2]]", "blocks of shape"),
        ("lengths", "[21]", "blocks of a layer 1"),
        ("lengths", "[21, 21, 21]", "no blocks"),
        ("lengths", '"many"', "token counts"),
    ],
)
def test_file_that_contradicts_itself_is_refused(tmp_path, field, value, words):
    path = tmp_path / "cache"
    filled().save(path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert json.loads(metadata["tables"]) == [[0, 1, 2], [3, 4, 5]]
    if value is None:
        del metadata[field]
    else:
        metadata[field] = value
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CacheFileError, match=words):
        PagedCache.load(path)


@pytest.mark.parametrize("change", ["missing", "foreign"])
def test_file_with_other_tensors_is_refused(tmp_path, change):
    path = tmp_path / "cache"
    filled().save(path)
    with safe_open(path, framework="pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if change == "missing":
        del tensors["layers.1.values"]
    else:
        tensors["lm_head.weight"] = torch.zeros(3)
    save_file(tensors, path, metadata=metadata)
    with pytest.raises(CacheFileError):
        PagedCache.load(path)
