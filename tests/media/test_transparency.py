"""Transparent parts: laid on one colour wherever pixels are made, read from masks, and counted while preparing."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from datasets import Dataset
from PIL import Image

from hf_bucketing import BucketingError, BucketTable, LatentSpec, Size
from hf_bucketing.caching import CacheConfig, LatentColumns
from hf_bucketing.columns import BucketColumns, MediaMetadata, map_columns
from hf_bucketing.columns.preparation import prepare
from hf_bucketing.columns.settings import SourceConfig, TableConfig
from hf_bucketing.conditions.references import ReferenceRule
from hf_bucketing.media import MediaColumns, MediaSource, View, ViewRule, iter_frames, load_first_frame
from hf_bucketing.media.probe import read_header
from hf_bucketing.media.rows import FileSample
from hf_bucketing.media.sample import load, load_references
from hf_bucketing.media.thumbnails import sample_thumbnails
from tests.media.heif import save_heic

HEIGHT, WIDTH = 32, 48
RED, GREEN, BLUE, WHITE, BLACK = (255, 0, 0), (0, 200, 0), (0, 0, 255), (255, 255, 255), (0, 0, 0)
SPEC = LatentSpec(temporal_stride=4, spatial_stride=8, patch=(1, 2, 2))


def pixels(hidden: tuple[int, ...] = RED, shown: tuple[int, ...] = GREEN) -> np.ndarray:
    """Return `(h, w, 4)`: a colour that is hidden on the left, and one that is opaque on the right."""
    picture = np.zeros((HEIGHT, WIDTH, 4), np.uint8)
    picture[:, : WIDTH // 2, :3] = hidden
    picture[:, WIDTH // 2 :] = (*shown, 255)
    return picture


def save(path: Path, picture: np.ndarray, **options: Any) -> MediaSource:
    Image.fromarray(picture).save(path, **options)
    return MediaSource.from_cell(str(path))


def sides(frame: np.ndarray | torch.Tensor) -> list[tuple[int, ...]]:
    """Return the colours of the left and of the right half, as levels; of tensors in [−1, 1] too."""
    if isinstance(frame, torch.Tensor):
        frame = ((frame[:, 0] + 1) * 127.5).permute(1, 2, 0).numpy()
    return [tuple(np.rint(frame[HEIGHT // 2, column]).astype(int).tolist()) for column in (WIDTH // 4, -WIDTH // 4)]


def close(found: list[tuple[int, ...]], wanted: list[tuple[int, ...]], levels: int) -> bool:
    return bool((abs(np.array(found) - np.array(wanted)) <= levels).all())


def save_all(folder: Path) -> dict[str, int]:
    """Write the same picture in all formats; return how far each may round colours."""
    whole = Image.fromarray(pixels())
    palette = Image.new("P", whole.size, 1)
    palette.putpalette([*RED, *GREEN, *BLUE])
    palette.paste(0, (0, 0, WIDTH // 2, HEIGHT))
    whole.save(folder / "rgba.png")
    whole.save(folder / "rgba.webp", lossless=True, exact=True)
    whole.save(folder / "rgba.tiff")
    whole.save(folder / "rgba.avif", quality=95)
    palette.save(folder / "palette.png", transparency=0)
    palette.save(folder / "opacities.png", transparency=bytes([0, 255]))
    palette.save(folder / "palette.gif", transparency=0)
    whole.convert("RGB").save(folder / "colour.png", transparency=RED)
    save_heic(folder / "rgba.heic", whole)
    return {path.name: 8 if path.suffix in (".avif", ".heic") else 0 for path in folder.iterdir()}


def test_hidden_colours_of_every_format_give_way_to_the_background(tmp_path: Path) -> None:
    for name, levels in save_all(tmp_path).items():
        picture = MediaSource.from_cell(str(tmp_path / name))
        assert read_header(picture).may_be_transparent, name
        for background, colour in (("white", WHITE), ("#0000ff", BLUE)):
            (frame,) = iter_frames(picture, [0.0], background=background)
            assert close(sides(frame), [colour, GREEN], levels), (name, background, sides(frame))
        (frame,) = iter_frames(picture, [0.0])
        assert close(sides(frame), [WHITE, GREEN], levels), name


def test_grey_levels_with_transparency_are_laid_too(tmp_path: Path) -> None:
    grey, opacity = pixels(hidden=(9, 9, 9), shown=(100, 100, 100))[..., 0], pixels()[..., 3]
    Image.merge("LA", [Image.fromarray(grey), Image.fromarray(opacity)]).save(tmp_path / "la.png")
    Image.fromarray(grey).save(tmp_path / "l.png", transparency=9)
    Image.fromarray(grey.astype(np.uint16) * 257).save(tmp_path / "deep.png", transparency=9 * 257)
    for name in ("la.png", "l.png", "deep.png"):
        (frame,) = iter_frames(MediaSource.from_cell(str(tmp_path / name)), [0.0])
        assert sides(frame) == [WHITE, (100, 100, 100)], name


def test_half_of_a_pixel_shows_half_of_the_background_and_opaque_pixels_stay(tmp_path: Path) -> None:
    picture = np.random.default_rng(0).integers(0, 255, (HEIGHT, WIDTH, 4), dtype=np.uint8)
    picture[..., 3] = 255
    (frame,) = iter_frames(save(tmp_path / "opaque.png", picture), [0.0], background="blue")
    assert (frame == picture[..., :3]).all()
    picture[..., 3] = 102  # 40 %
    (frame,) = iter_frames(save(tmp_path / "half.png", picture), [0.0])
    assert abs(frame - (0.4 * picture[..., :3] + 0.6 * 255)).max() <= 1


def test_a_mask_whose_shape_is_transparency_is_read_from_there(tmp_path: Path) -> None:
    drawn = np.dstack([pixels(BLACK, WHITE)[..., :3], np.full((HEIGHT, WIDTH), 255, np.uint8)])
    view = View(size=Size(1, HEIGHT, WIDTH), fps=0.0, background="blue")
    sample = save(tmp_path / "sample.png", pixels()[..., :3])
    right = [0.0, 1.0]
    cases = {
        "white, cut out": (pixels(WHITE, WHITE), right), "black, cut out": (pixels(BLACK, BLACK), right),
        "white over hidden black": (pixels(BLACK, WHITE), right), "drawn": (drawn, right),
        "black over hidden white": (pixels(WHITE, BLACK), right), "all opaque": (np.full_like(drawn, 255), [1.0, 1.0]),
        "all transparent": (np.full_like(drawn, 255) * np.array([1, 1, 1, 0], np.uint8), [0.0, 0.0]),
    }  # fmt: skip
    for name, (picture, wanted) in cases.items():
        mask = save(tmp_path / "mask.png", picture)
        file = FileSample(source=sample, view=view, conditions={"mask": mask})
        shown = load(file).conditions["mask"][0, 0, HEIGHT // 2]
        assert [shown[WIDTH // 4].item(), shown[-WIDTH // 4].item()] == wanted, name
        thumbnail = Image.open(io.BytesIO(sample_thumbnails(file)["mask"].data)).convert("L")
        levels = [thumbnail.getpixel((place, HEIGHT // 2)) / 255 for place in (WIDTH // 4, 3 * WIDTH // 4)]
        assert np.abs(np.subtract(levels, wanted)).max() < 0.1, name


def test_samples_conditions_references_and_thumbnails_have_the_background_of_the_view(tmp_path: Path) -> None:
    picture = save(tmp_path / "picture.png", pixels())
    assert sides(np.array(load_first_frame(picture, Size(1, HEIGHT, WIDTH)))) == [WHITE, GREEN]
    for background, colour in (("white", WHITE), ("blue", BLUE)):
        rule = ViewRule(random_crop=False, background=background)
        size = Size(1, HEIGHT, WIDTH)
        view = rule.view(size, num_frames=1, fps=0.0, draws=np.zeros(0))
        conditions = {"control": picture, "first_frame": picture, "face": picture, "reference": (picture,)}
        file = FileSample(source=picture, view=view, conditions=conditions)
        sample = load(file)
        shown = {**sample.conditions, "reference": sample.conditions["reference"][0]}
        for name, values in {"pixels": sample.pixels, **shown}.items():
            assert sides(values) == [colour, GREEN], (name, background)
        (reference,) = load_references([picture], size, ReferenceRule(), fps=0.0, background=background)
        assert sides(reference) == [colour, GREEN]
        assert sides(np.array(load_first_frame(picture, size, background=background))) == [colour, GREEN]
        for name, thumbnail in sample_thumbnails(file).items():
            assert close(sides(np.array(Image.open(io.BytesIO(thumbnail.data)))), [colour, GREEN], 8), name


@pytest.mark.parametrize("background", ["whit", "#12", "rgba(0,0,0,0)", "#00000000"])
def test_a_background_that_is_no_opaque_colour_is_refused(background: str) -> None:
    with pytest.raises(BucketingError, match="`background` must be a colour"):
        ViewRule(background=background)


@pytest.mark.parametrize(("name", "codec", "pixel_format", "levels"), [
    ("vp9.webm", "libvpx-vp9", "yuva420p", 8), ("prores.mov", "prores_ks", "yuva444p10le", 8),
    ("animation.mov", "qtrle", "argb", 0), ("pictures.mov", "png", "rgba", 0),
])  # fmt: skip
def test_videos_with_transparency_are_laid_on_the_background(
    tmp_path: Path, name: str, codec: str, pixel_format: str, levels: int
) -> None:
    path = tmp_path / name
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=8, width=WIDTH, height=HEIGHT, pix_fmt=pixel_format)
        for _ in range(3):
            frame = av.VideoFrame.from_ndarray(pixels(), format="rgba").reformat(format=pixel_format)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    clip = MediaSource.from_cell(str(path))
    header = read_header(clip)
    assert (header.info[:4], header.may_be_transparent) == ((WIDTH, HEIGHT, 3, 8.0), True)
    for background, colour in (("white", WHITE), ("blue", BLUE)):
        frames = list(iter_frames(clip, [0.0, 0.125, 0.25], background=background))
        assert len(frames) == 3
        for frame in frames:
            assert close(sides(frame), [colour, GREEN], levels), sides(frame)


def test_latents_of_transparent_pictures_belong_to_their_background_and_others_to_none(tmp_path: Path) -> None:
    opaque = np.dstack([pixels()[..., :3]])
    save(tmp_path / "clear.png", pixels())
    save(tmp_path / "opaque.png", opaque)
    for number in (1, 2):
        save(tmp_path / f"mask{number}.png", pixels(BLACK, WHITE) if number == 1 else opaque)
    rows = Dataset.from_dict({
        "file": ["clear.png", "opaque.png", "opaque.png"], "mask": ["mask2.png", "mask1.png", "mask2.png"],
        "index": [0, 1, 2],
    })  # fmt: skip
    rows = map_columns(rows, MediaMetadata("file", root=str(tmp_path)))
    table = BucketTable(sizes=(Size(1, HEIGHT, WIDTH),))
    rows = map_columns(rows, BucketColumns(table, SPEC))

    def keys(background: str, **conditions: str) -> list[str]:
        columns = LatentColumns(
            encode=lambda pixels, shown: {"latents": pixels},
            model="model",
            table=table,
            files=MediaColumns(column="file", root=str(tmp_path), conditions=conditions),
            config=CacheConfig(
                folder=str(tmp_path / "cache"), views=ViewRule(random_crop=False, background=background)
            ),
        )
        return map_columns(rows, columns, overwrite=True)["latents_key"][:]

    white, blue = keys("white"), keys("blue")
    assert [one == other for one, other in zip(white, blue, strict=True)] == [False, True, True]
    white, blue = keys("white", mask="mask"), keys("blue", mask="mask")
    assert [one == other for one, other in zip(white, blue, strict=True)] == [False, False, True]


def test_preparing_counts_what_may_be_transparent(tmp_path: Path) -> None:
    (tmp_path / "masks").mkdir()
    for number in range(4):
        save(tmp_path / f"{number}.png", pixels() if number < 3 else pixels()[..., :3])
        (tmp_path / f"{number}.txt").write_text("a green field")
        save(tmp_path / "masks" / f"{number}.png", pixels(WHITE, WHITE))
    rows = "file_name,mask,text,width,height\n" + "".join(
        f"{number}.png,masks/{number}.png,a field,{WIDTH},{HEIGHT}\n" for number in range(4)
    )
    (tmp_path / "rows.csv").write_text(rows)
    for sizes_from, counted in (("headers", True), ("auto", True), ("columns", False)):
        said: list[str] = []
        prepared = prepare(
            SourceConfig(
                dataset=str(tmp_path / "rows.csv"),
                mask_column="mask",
                sizes_from=sizes_from,
                table=TableConfig(bucket_tokens=[6], bucket_frames=[1]),
            ),
            spec=SPEC,
            say=said.append,
        )
        text = "\n".join(said)
        assert ("3 of 4 files can hold transparent parts" in text) == counted
        assert "4 files of conditions can hold transparent parts: those of masks are not learned" in text
        assert not {"may_be_transparent", "transparent_conditions"} & {*prepared.dataset.column_names}
