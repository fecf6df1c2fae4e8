"""Entries on disk: whole or absent, and read back as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fsspec.core import url_to_fs

from hf_bucketing import CacheError
from hf_bucketing.caching.store import TensorCache, entry_key
from hf_bucketing.files import complete_file

KEY = entry_key(sample="a", size=(1, 2, 3))


def test_an_entry_is_read_back_with_what_was_written_about_it(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path / "cache")
    assert not cache.holds(KEY)
    tensors = {"latents": torch.randn(2, 3).t(), "half": torch.ones(2, dtype=torch.bfloat16)}
    cache.write(KEY, tensors, about={"size": (1, 2, 3), "fps": 8.0})
    assert cache.holds(KEY)
    back, about = cache.read(KEY)
    assert all(
        torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items()
    )
    assert about == {"size": [1, 2, 3], "fps": 8.0}
    assert [path.relative_to(tmp_path / "cache").parts for path in tmp_path.rglob("*.safetensors")] == [
        (KEY[:2], f"{KEY}.safetensors")
    ]


def test_a_view_of_a_stack_is_written_alone(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    cache.write(KEY, {"latents": torch.randn(64, 1000)[3]}, about={})
    assert Path(cache.path(KEY)).stat().st_size < 5000


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 100, None], ids=["empty", "short", "noise", "cut"])
def test_a_corrupt_entry_is_not_held_and_names_itself_when_read(content: bytes | None, tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    cache.write(KEY, {"latents": torch.ones(9)}, about={})
    path = Path(cache.path(KEY))
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    assert not cache.holds(KEY)
    with pytest.raises(CacheError, match=rf"{KEY}.*cannot be read.*delete it and run hf_bucketing cache"):
        cache.read(KEY)
    cache.write(KEY, {"latents": torch.ones(9)}, about={})
    assert cache.holds(KEY)


def test_an_entry_in_an_object_store_is_read_back_by_another_process_and_a_missing_one_says_so() -> None:
    cache, back = (TensorCache("memory://bucket/cache") for _ in range(2))
    cache.check_writable()
    tensors = {"latents": torch.randn(2, 3).t(), "references": [torch.ones(2), torch.zeros(0)]}
    assert not cache.holds(KEY)
    with pytest.raises(
        CacheError, match=rf"memory://bucket/cache/../{KEY}.safetensors is missing; run hf_bucketing cache"
    ):
        cache.read(KEY)
    cache.write(KEY, tensors, about={"size": (1, 2, 3)})
    assert back.holds(KEY)
    (read, about), expected = back.read(KEY), {**tensors, "references": tuple(tensors["references"])}
    assert about == {"size": [1, 2, 3]}
    assert torch.equal(read["latents"], expected["latents"])
    assert all(map(torch.equal, read["references"], expected["references"]))
    file_system, path = url_to_fs(cache.path(KEY))
    file_system.pipe_file(path, file_system.cat_file(path)[:-1])
    with pytest.raises(CacheError, match=r"cannot be read.*delete it"):
        cache.read(KEY)


@pytest.mark.parametrize(
    "call", [lambda c: c.holds(KEY), lambda c: c.size(KEY), lambda c: c.read(KEY), lambda c: c.check_writable()]
)
def test_an_object_store_that_cannot_be_reached_is_an_error_and_no_missing_entry(call) -> None:
    with pytest.raises(CacheError, match=r"^nothing://bucket/\S+ cannot be reached \(.*credentials"):
        call(TensorCache("nothing://bucket"))


def test_the_size_of_an_entry_is_that_of_its_file_or_object(tmp_path: Path) -> None:
    caches = TensorCache(tmp_path), TensorCache("memory://sizes/cache")
    assert [cache.size(KEY) for cache in caches] == [0, 0]
    for cache in caches:
        cache.write(KEY, {"latents": torch.ones(9)}, about={})
    (file,) = tmp_path.rglob("*.safetensors")
    assert [cache.size(KEY) for cache in caches] == [file.stat().st_size] * 2


def test_a_missing_entry_says_so(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match="is missing; run hf_bucketing cache"):
        TensorCache(tmp_path).read(KEY)


def test_what_a_killed_writer_left_is_no_entry_and_is_swept(tmp_path: Path) -> None:
    cache = TensorCache(tmp_path)
    killed = complete_file(cache.path(KEY), shared=True)
    killed.__enter__().write_bytes(b"half")
    cache.write(entry_key(sample="b"), {"latents": torch.ones(9)}, about={})
    assert not cache.holds(KEY)
    assert cache.sweep() == 1
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [f"{entry_key(sample='b')}.safetensors"]


def test_keys_differ_where_a_part_does_and_only_there() -> None:
    assert entry_key(a=1, b=(2, 3)) == entry_key(b=[2, 3], a=1)
    assert len({entry_key(a=1), entry_key(a=2), entry_key(b=1), entry_key(a="1")}) == 4
