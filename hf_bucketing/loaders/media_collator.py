"""What bucket and pack collators share: decode rows, each at its target size, or those that stand in for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from ..buckets.sizes import CropBox, Size
from ..errors import BucketingError, ColumnError, MediaError
from ..media.decoders import DecoderName
from ..media.sample import load_sample
from ..media.source import MediaSource
from ..media.views import FramePicking, View, ViewRule, seeded_draws
from .faults import StandIns

Row = Mapping[str, Any]
Loaded = tuple[torch.Tensor, View, CropBox]


class MediaCollator:
    """Decode the rows of a batch, each at the size that [`target`][MediaCollator.target] names.

    Crops, the first frame and flips are drawn at random. With a `seed`, they are a function of the seed, the epoch
    (tell it by `set_epoch`) and the row's `index` column alone, so a resumed run repeats them on any number of workers
    and processes. Without one they follow torch's random state in the worker.

    Args:
        column (`str`): Media column: paths, bytes, or dictionaries of both (`Image(decode=False)`).
        caption_column (`str`, *optional*): Text column; None if there is none.
        root (`str`, *optional*): Folder that relative paths start from.
        random_crop (`bool`): Crop and start at random; if False, in the centre and at the first frame.
        frame_picking (`"start"`, `"uniform"` or `"random"`, *optional*): Which frames instead of those; see
            [`ViewRule`][hf_bucketing.media.ViewRule].
        flip_probability (`float`): Of swapping left and right.
        decoder (`"pyav"` or `"torchcodec"`): Of videos.
        seed (`int`, *optional*): See above.
        on_error (`"raise"` or `"replace"`): What an unreadable sample does: end the run, or give its place to another
            one of its bucket (of as many tokens, or fewer where there is none, in a pack), drawn from the seed, the
            epoch and its index. The batch then holds the other's index and caption.
        stand_ins ([`StandIns`], *optional*): The data set, the log and the limits, for `"replace"`.

    Raises:
        BucketingError: If `on_error` is unknown, or not matched by `stand_ins`, or `ViewRule` refuses an option: a
            decoder that cannot be loaded, for one.
    """

    def __init__(
        self,
        *,
        column: str = "video",
        caption_column: str | None = "caption",
        root: str | None = None,
        random_crop: bool = True,
        frame_picking: FramePicking | None = None,
        flip_probability: float = 0.0,
        decoder: DecoderName = "pyav",
        seed: int | None = None,
        on_error: Literal["raise", "replace"] = "raise",
        stand_ins: StandIns | None = None,
    ) -> None:
        if on_error not in ("raise", "replace") or (on_error == "replace") != (stand_ins is not None):
            raise BucketingError(
                f'on_error must be "raise", or "replace" with stand_ins=StandIns(dataset, log=…); got {on_error!r} '
                f"with stand_ins={stand_ins!r}."
            )
        self.column = column
        self.caption_column = caption_column
        self.root = root
        self.views = ViewRule(
            random_crop=random_crop,
            frame_picking=frame_picking,
            flip_probability=flip_probability,
            video_decoder=decoder,
        )
        self.seed = seed
        self.stand_ins = stand_ins
        # Shared memory, so that persistent workers see the epoch change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch whose crops are drawn; needed with a `seed`, before the loader is iterated."""
        self._epoch.fill_(epoch)

    def target(self, rows: Sequence[Row]) -> list[Size]:
        """Return the target size of each row."""
        raise NotImplementedError

    def load(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Return `pixel_values` as a list of `(3, F, H, W)`, and `size`, `crop`, `flip`, `fps`, `caption` and `index`.

        Raises:
            ColumnError: If a needed column is missing.
            MediaError: If a file cannot be decoded; the message names the row.
        """
        require(rows[0], [self.column, "num_frames", "fps"])
        if self.caption_column is not None:
            require(rows[0], [self.caption_column])
        found = [self._load_or_replace(row, size) for row, size in zip(rows, self.target(rows), strict=True)]
        rows, sizes, loaded = (
            [row for row, _, _ in found],
            [size for _, size, _ in found],
            [part for *_, part in found],
        )
        batch: dict[str, Any] = {
            "pixel_values": [pixels for pixels, *_ in loaded],
            "size": sizes,
            "crop": [crop for *_, crop in loaded],
            "flip": [view.flip for _, view, _ in loaded],
            "fps": [view.fps for _, view, _ in loaded],
        }
        if self.caption_column is not None:
            batch["caption"] = [row[self.caption_column] for row in rows]
        if "index" in rows[0]:
            batch["index"] = [int(row["index"]) for row in rows]
        return batch

    def candidates(self, row: Row, stand_ins: StandIns) -> npt.NDArray[np.int64]:
        """Return the positions of the rows that may stand in for an unreadable one."""
        raise NotImplementedError

    def stand_in_size(self, row: Row, size: Size) -> Size:
        """Return the target size of a row that stands in for one of target `size`."""
        return size

    def _load_or_replace(self, row: Row, size: Size) -> tuple[Row, Size, Loaded]:
        """Load a row, or the first readable one of its stand-ins."""
        if self.stand_ins is None:
            return row, size, self._load(row, size)
        require(row, ["index"])
        epoch, index = int(self._epoch), int(row["index"])
        others: list[int] | None = None
        while True:
            try:
                loaded = self._load(row, size)
            except MediaError as error:
                if others is None:
                    candidates = self.candidates(row, self.stand_ins)
                    others = self.stand_ins.choose(candidates, index=index, seed=self.seed or 0, epoch=epoch)
                if not others:
                    raise MediaError(f"{error} No readable sample was found to stand in for row {index}.") from error
                failed, row = int(row["index"]), self.stand_ins.dataset[others.pop(0)]
                size = self.stand_in_size(row, size)
                self.stand_ins.report(epoch=epoch, index=failed, reason=str(error), stand_in=int(row["index"]))
            else:
                self.stand_ins.in_a_row = 0
                return row, size, loaded

    def _load(self, row: Row, size: Size) -> Loaded:
        name = f"row {row['index']}" if "index" in row else "a row without an index column"
        view = self.views.view(
            size, num_frames=int(row["num_frames"]), fps=float(row["fps"]), draws=self._draws(row), name=name
        )
        try:
            source = MediaSource.from_cell(row[self.column], root=self.root, name=name)
            pixels, crop = load_sample(source, view)
        except MediaError as error:
            raise MediaError(f"Cannot load {name}: {error}") from error
        return pixels, view, crop

    def _draws(self, row: Row) -> np.ndarray:
        """Return the uniform numbers in [0, 1) that the row's view takes."""
        count = self.views.num_draws
        if not count:
            return np.zeros(0)
        if self.seed is None:
            return torch.rand(count, dtype=torch.float64).numpy()
        require(row, ["index"])
        return seeded_draws(count, seed=self.seed, epoch=int(self._epoch), index=int(row["index"]))


def require(row: Row, columns: Sequence[str]) -> None:
    """Raise if a row lacks a column; the message says how to get it.

    Raises:
        ColumnError: If so.
    """
    missing = [column for column in columns if column not in row]
    if missing:
        hint = ' Add one with dataset.add_column("index", range(len(dataset))).' if "index" in missing else ""
        hint = hint or " MediaMetadata and BucketColumns compute columns of sizes and buckets."
        raise ColumnError(f"A row lacks {missing}; it has {sorted(row)}.{hint}")
