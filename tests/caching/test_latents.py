"""Cached columns: what changed is encoded again, in stacks of one size, and nothing else."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketingError, BucketTable, ColumnError, LatentSpec, MediaError, Size, open_table
from hf_bucketing.caching import CacheConfig, LatentColumns, TextColumns
from hf_bucketing.caching.store import TensorCache
from hf_bucketing.columns import BucketColumns, MediaMetadata, map_columns
from hf_bucketing.media import MediaColumns, MediaSource, ViewRule, write_video
from hf_bucketing.randomness import ROW
from tests.media.test_media import numbered_frames
from tests.media.test_video import B_FRAMES, encode

SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))
TABLE = BucketTable(sizes=(Size(1, 32, 48), Size(5, 32, 32)))
ROWS = 10


class Encoder:
    """Averages of 8 × 8 pixels, and a list of the stacks that were encoded."""

    def __init__(self) -> None:
        self.stacks: list[tuple[int, ...]] = []

    def __call__(self, pixels: torch.Tensor, shown: dict) -> dict[str, torch.Tensor]:
        self.stacks.append(tuple(pixels.shape))
        latents = torch.nn.functional.avg_pool3d(pixels, (1, 8, 8))
        return {"latents": latents, "first_frame": latents[:, :, :1] + 1}

    @property
    def samples(self) -> int:
        return sum(stack[0] for stack in self.stacks)


@pytest.fixture
def media(tmp_path: Path) -> Path:
    """Eight images and two videos."""
    rng = np.random.default_rng(0)
    for index in range(ROWS):
        if index % 5 == 4:
            frames = rng.integers(0, 255, (9, 40, 48, 3), dtype=np.uint8)
            write_video(tmp_path / f"{index}.mp4", frames, fps=8)
        else:
            Image.fromarray(rng.integers(0, 255, (40, 56, 3), dtype=np.uint8)).save(tmp_path / f"{index}.png")
    return tmp_path


def rows_of(media: Path, *, table=TABLE, target_fps: float = 8.0) -> Dataset:
    names = sorted(path.name for path in media.iterdir() if path.suffix in (".png", ".mp4"))
    dataset = Dataset.from_dict({"file": names, ROW: list(range(len(names)))})
    dataset = map_columns(dataset, MediaMetadata("file", target_fps=target_fps, root=str(media)))
    return map_columns(dataset, BucketColumns(table, SPEC))


def columns(media: Path, encoder: Encoder, **options) -> LatentColumns:
    files = MediaColumns(column=options.pop("column", "file"), root=options.pop("root", str(media)))
    own = {"model": "m", "table": TABLE, "files": files}
    own = {name: options.pop(name, default) for name, default in own.items()}
    return LatentColumns(encode=encoder, config=CacheConfig(folder=str(media / "cache"), **options), **own)


def encoded(media: Path, rows: Dataset | None = None, **options) -> int:
    """Return how many samples another run encodes."""
    encoder = Encoder()
    map_columns(rows_of(media) if rows is None else rows, columns(media, encoder, **options))
    return encoder.samples


def test_samples_of_one_size_are_encoded_together_and_found_again(media: Path) -> None:
    encoder = Encoder()
    latents = columns(media, encoder, batch_size=3)
    rows = map_columns(rows_of(media), latents)
    assert sorted(stack[0] for stack in encoder.stacks) == [2, 2, 3, 3]
    assert {stack[2:] for stack in encoder.stacks} == {(1, 32, 48), (5, 32, 32)}
    assert latents.counts == {"encoded": ROWS}
    assert len(set(rows["latents_key"])) == ROWS
    again = columns(media, encoder, batch_size=3)
    assert map_columns(rows_of(media), again)["latents_key"] == rows["latents_key"]
    assert again.counts == {"found": ROWS}
    assert len(encoder.stacks) == 4


def test_an_entry_holds_the_latents_of_its_sample_and_its_geometry(media: Path) -> None:
    rows = map_columns(rows_of(media), columns(media, Encoder()))
    cache = TensorCache(media / "cache")
    for row in rows:
        tensors, about = cache.read(row["latents_key"])
        size = TABLE.size(row["bucket_id"])
        assert tensors["latents"].shape == (3, size.frames, size.height // 8, size.width // 8)
        assert about == {
            "size": list(size), "crop": [0, 0, 32, 48] if size.frames == 1 else [0, 3, 32, 32],
            "flip": False, "fps": row["fps"],
        } or size.frames == 1  # fmt: skip
    picture = torch.from_numpy(np.array(Image.open(media / "0.png"))).permute(2, 0, 1)[None]
    resized = torch.nn.functional.interpolate(picture, (34, 48), mode="bicubic", antialias=True)[:, :, 1:33]
    expected = torch.nn.functional.avg_pool2d(resized.float() / 127.5 - 1, 8)
    assert torch.allclose(cache.read(rows[0]["latents_key"])[0]["latents"][:, 0], expected[0], atol=1e-6)


def test_a_file_that_is_decoded_otherwise_than_before_is_encoded_again_and_no_other(
    media: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(media / "10.mp4", numbered_frames(9), rate=8, **{"x264-params": B_FRAMES})
    data = (media / "10.mp4").read_bytes()
    (media / "10.mp4").write_bytes(data.replace(b"ctts", b"free").replace(b"edts", b"free"))
    with monkeypatch.context() as older:
        older.setattr("hf_bucketing.caching.columns.decoding_rules", lambda source: [])
        assert encoded(media) == ROWS + 1
        assert encoded(media) == 0
    assert encoded(media) == 1, "the times of its display are lost"
    assert encoded(media) == 0


def test_a_changed_file_is_encoded_again_and_no_other(media: Path) -> None:
    assert encoded(media) == ROWS
    picture = Image.open(media / "1.png").rotate(180)
    picture.save(media / "1.png")
    assert encoded(media) == 1
    os.utime(media / "2.png", ns=(0, 0))
    assert encoded(media) == 1


def test_a_file_of_the_same_length_and_the_time_of_an_archive_is_told_by_its_contents(media: Path) -> None:
    path, seconds = media / "0.png", 315532800
    for time, another in ((seconds * 10**9, 1), (seconds * 10**9 + 1, 0)):  # what a program set, it meant
        for shade in (0, 255):
            Image.new("RGB", (56, 40), (shade,) * 3).save(path, compress_level=0)
            os.utime(path, ns=(time, time))
            samples = encoded(media)
        assert samples == another
    assert MediaSource.from_cell(str(path)).version() == [path.stat().st_size, time], "as in keys of earlier releases"
    assert encoded(media) == 0


def test_a_moved_folder_is_not_encoded_again(media: Path) -> None:
    (media / "here").mkdir()
    for path in [path for path in media.iterdir() if path.is_file()]:
        path.rename(media / "here" / path.name)
    assert encoded(media / "here") == ROWS
    (media / "here").rename(media / "there")
    assert encoded(media / "there") == 0


def test_a_changed_bucket_frame_rate_model_or_view_is_encoded_again_where_it_matters(media: Path) -> None:
    assert encoded(media) == ROWS
    smaller = BucketTable(sizes=(Size(1, 32, 48), Size(5, 16, 16)))
    assert encoded(media, rows_of(media, table=smaller), table=smaller) == 2  # the videos alone
    renumbered = BucketTable(sizes=(Size(1, 16, 16), Size(1, 32, 48), Size(5, 32, 32)))
    assert encoded(media, rows_of(media, table=renumbered), table=renumbered) == 0
    assert encoded(media, rows_of(media, target_fps=7.0)) == 2
    assert encoded(media, model="another") == ROWS
    assert encoded(media, views=ViewRule(random_crop=False, flip_probability=1.0)) == ROWS
    assert encoded(media, views=ViewRule(random_crop=False, frame_picking="uniform")) == 2
    assert encoded(media, views=ViewRule(random_crop=False, frame_picking="start")) == 0
    first = encoded(media, views=ViewRule(frame_picking="start"), seed=0)
    assert 0 < first <= ROWS
    assert encoded(media, views=ViewRule(frame_picking="start"), seed=0) == 0
    assert encoded(media, views=ViewRule(frame_picking="start"), seed=1) > 0
    assert encoded(media) == 0


def test_a_crop_that_random_draws_do_not_move_is_not_encoded_again(media: Path) -> None:
    for number in (0, 1, 2, 3, 5, 6, 7, 8):
        Image.open(media / f"{number}.png").crop((0, 0, 48, 32)).save(media / f"{number}.png")
    table = BucketTable(sizes=(Size(1, 32, 48),))
    rows = rows_of(media, table=table).filter(lambda row: row["bucket_id"] >= 0)
    assert encoded(media, rows, table=table) == 8
    assert encoded(media, rows, table=table, views=ViewRule(), seed=5) == 0


def test_samples_of_packs_keep_their_own_size_and_bytes_are_known_by_their_content(media: Path) -> None:
    table = open_table(SPEC)
    rows = rows_of(media, table=table)
    assert encoded(media, rows, table=table) == ROWS
    data = [{"bytes": (media / name).read_bytes(), "path": None} for name in rows["file"]]
    held = rows.remove_columns("file").add_column("file", data)
    assert encoded(media, held, table=table) == ROWS
    os.utime(media / "1.png", ns=(0, 0))
    assert encoded(media, held, table=table) == 0


def test_identical_samples_share_an_entry(media: Path) -> None:
    rows = rows_of(media)
    twice = rows.select([0, 1, 0, 1])
    encoder = Encoder()
    latents = columns(media, encoder)
    keys = map_columns(twice, latents)["latents_key"]
    assert keys[:2] == keys[2:]
    assert latents.counts == {"encoded": 2, "found": 2}
    assert encoder.stacks == [(2, 3, 1, 32, 48)]


def test_a_corrupt_entry_is_encoded_again(media: Path) -> None:
    rows = map_columns(rows_of(media), columns(media, Encoder()))
    path = Path(TensorCache(media / "cache").path(rows[3]["latents_key"]))
    path.write_bytes(path.read_bytes()[:-5])
    assert encoded(media) == 1


def test_unreadable_and_rejected_rows_have_no_entry(media: Path) -> None:
    rows = rows_of(media)
    (media / "1.png").write_bytes(b"broken")
    (media / "2.png").unlink()
    ids = [-1, *rows["bucket_id"][1:]]
    rows = rows.remove_columns("bucket_id").add_column("bucket_id", ids)
    with pytest.raises(MediaError, match=r"[12]\.png"):
        map_columns(rows, columns(media, Encoder()))
    latents = columns(media, Encoder(), on_error="reject")
    keys = map_columns(rows, latents)["latents_key"]
    assert [position for position, key in enumerate(keys) if not key] == [0, 1, 2]
    assert latents.counts == {"rejected": 1, "unreadable": 2, "encoded": ROWS - 3}


def test_columns_that_lie_about_the_size_are_an_error(media: Path) -> None:
    rows = rows_of(media).remove_columns("width").add_column("width", [99] * ROWS)
    with pytest.raises(MediaError, match="but its row was made for an image of 99×40 pixels"):
        map_columns(rows, columns(media, Encoder()))


def test_impossible_settings_are_refused(media: Path) -> None:
    for options in ({"batch_size": 0}, {"num_threads": 0}, {"on_error": "ignore"}, {"batching": "random"}):
        with pytest.raises(BucketingError, match=next(iter(options))):
            columns(media, Encoder(), **options)


def texts(folder: Path, calls: list[list[str]], *, masked: bool = True, **options) -> TextColumns:
    def encode(captions: list[str]) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, torch.Tensor]]:
        calls.append(captions)
        lengths = torch.tensor([len(caption) for caption in captions])
        mask = (torch.arange(6) < lengths[:, None]).long()
        values = torch.ones(len(captions), 6, 2) * lengths[:, None, None] + 1
        pooled = {"pooled_projections": -values[:, 0]}
        return (values, mask, pooled) if masked else (values * mask[..., None], None, pooled)

    return TextColumns(encode=encode, model="t", column="caption", config=CacheConfig(folder=str(folder), **options))


@pytest.mark.parametrize("masked", [True, False])
def test_identical_captions_are_encoded_once_and_padding_is_not_stored(masked: bool, tmp_path: Path) -> None:
    calls: list[list[str]] = []
    rows = Dataset.from_dict({"caption": ["abc", "a", "abc", "", "a"]})
    text = texts(tmp_path, calls, masked=masked, batch_size=2)
    keys = map_columns(rows, text)["text_key"]
    assert calls == [["abc", "a"], [""]]
    assert keys == [text.key(caption) for caption in rows["caption"]]
    tensors, about = TensorCache(tmp_path).read(keys[0])
    assert (tensors["values"].tolist(), about) == ([[4.0, 4.0]] * 3, {"length": 6})
    assert ("mask" in tensors) == masked
    assert tensors["other.pooled_projections"].tolist() == [-4.0, -4.0]
    assert map_columns(rows, text)["text_key"] == keys
    assert len(calls) == 2
    map_columns(rows, replace(text, model="other"))
    assert len(calls) == 4


def test_captions_that_are_no_text_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ColumnError, match="must be a text or a list of texts, got None"):
        texts(tmp_path, [])({"caption": ["a", None]})


def test_files_at_urls_are_encoded_again_when_their_servers_tell_another_version(media: Path) -> None:
    rows = rows_of(media)
    urls = [f"file://{media}/{name}" for name in rows["file"]]
    rows = rows.remove_columns(["file"]).add_column("file", urls)
    assert encoded(media, rows, root=None) == ROWS
    assert encoded(media, rows, root=None) == 0
    os.utime(media / "0.png", ns=(1, 1))
    assert encoded(media, rows, root=None) == 1
    (media / "0.png").unlink()
    with pytest.raises(MediaError, match=r"file://.*/0\.png"):
        encoded(media, rows, root=None)
    assert encoded(media, rows, root=None, on_error="reject") == 0
