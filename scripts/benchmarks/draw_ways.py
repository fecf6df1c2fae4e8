r"""Draw the same nine clips cropped to squares, padded, bucketed and packed.

python scripts/benchmarks/draw_ways.py --figure docs/figures/ways.png --output scripts/benchmarks/results/ways.json

The clips are generated and written as files; the library reads, assigns, plans and collates them, and every number in
the picture is counted on them.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmark_tools import machine, report
from PIL import Image
from ways.canvas import BAD, CARD, GOOD, HEADING, PAPER, QUIET, Box, Canvas, depth_of
from ways.clips import CLIPS, Clip, Ways, collated, plan_ways, write_clips

from hf_bucketing import Size
from hf_bucketing.command_line.flags import FlagParser
from hf_bucketing.command_line.script import run_script
from hf_bucketing.files import complete_file
from hf_bucketing.media import View

WIDTH, MARGIN, GAP, INSET = 1200, 24, 20, 16
PANEL = (WIDTH - 2 * MARGIN - GAP) // 2
HEAD = 262
"""Height of the title and the nine clips."""
TITLE = 106
"""Height of a panel's title."""
ROW, ROW_GAP = 40, 6
COLORS = 128


def draw_clips(canvas: Canvas, clips: Sequence[Clip], place: Box) -> None:
    """Draw all clips as stacks at one scale, in a row."""
    gap = 10
    room = place.width - sum(CARD * depth_of(clip) for clip in clips) - gap * (len(clips) - 1)
    scale = room / sum(size.width for size in CLIPS)
    left = place.left
    for clip, size in zip(clips, CLIPS, strict=True):
        height = size.height * scale
        canvas.stack(clip, Box(left, place.top + place.height - height, size.width * scale, height))
        left += size.width * scale + CARD * depth_of(clip) + gap


def draw_squares(canvas: Canvas, clips: Sequence[Clip], ways: Ways, place: Box) -> None:
    """Draw what a square keeps of each clip; the rest is pale and hatched."""
    for number, box in enumerate(in_rows(CLIPS, 3, place, gap=12)):
        target = Size(*(int(side[number]) for side in ways.squares.sizes))
        (height, width), crop = View(size=target, fps=0.0).crop(*CLIPS[number][1:])
        frame = Image.fromarray(clips[number][0]).resize((width, height))
        pale = Image.blend(frame.convert("L").convert("RGB"), Image.new("RGB", frame.size, PAPER), 0.45)
        canvas.paste(pale, box, outline="#b9b9b9")
        canvas.hatch(box, paper=None)
        scale = box.width / width
        kept = Box(box.left + crop.left * scale, box.top + crop.top * scale, crop.width * scale, crop.height * scale)
        inside = frame.crop((crop.left, crop.top, crop.left + crop.width, crop.top + crop.height))
        canvas.paste(inside, kept, outline=BAD, width=4)


def in_rows(sizes: Sequence[Size], columns: int, place: Box, *, gap: float) -> list[Box]:
    """Return a box for each size, in centred rows of one height."""
    rows = [sizes[first : first + columns] for first in range(0, len(sizes), columns)]
    height = (place.height - gap * (len(rows) - 1)) / len(rows)
    boxes = []
    for line, row in enumerate(rows):
        widths = [height * size.width / size.height for size in row]
        left = place.left + (place.width - sum(widths) - gap * (len(row) - 1)) / 2
        for width in widths:
            boxes.append(Box(left, place.top + line * (height + gap), width, height))
            left += width + gap
    return boxes


def draw_sequences(
    canvas: Canvas, clips: Sequence[Clip], ways: Ways, sequences: Sequence[Sequence[int]], place: Box
) -> None:
    """Draw sequences of `max_tokens` tokens with their clips; what no clip fills is hatched."""
    scale = place.width / ways.max_tokens
    for line, numbers in enumerate(sequences):
        row = Box(place.left, place.top + line * (ROW + ROW_GAP), place.width, ROW)
        canvas.hatch(row)
        for number in numbers:
            film = row._replace(width=float(ways.num_tokens[number]) * scale)
            canvas.film(clips[number], film)
            row = row._replace(left=film.left + film.width)


def draw_batches(canvas: Canvas, ways: Ways, place: Box) -> None:
    """Draw the batches of the bucket plan, each in a frame of its own."""
    inside, gap = 8, 12
    left, top, tallest = place.left, place.top, 0.0
    for batch in sorted(ways.batches.batches(), key=min):
        clips = collated(ways, batch, packed=False)
        height, width = clips[0][0].shape[:2]
        scale = (62 if width > height else 86) / height
        behind = CARD * (depth_of(clips[0]) - 1)
        step = width * scale + behind + inside
        frame = Box(left, top, len(clips) * step + inside, height * scale + behind + 2 * inside)
        if frame.left + frame.width > place.left + place.width:
            left, top, tallest = place.left, top + tallest + gap, 0.0
            frame = frame._replace(left=left, top=top)
        canvas.draw.rounded_rectangle(frame.corners, 8, outline=GOOD, width=3)
        for number, clip in enumerate(clips):
            x, y = frame.left + inside + number * step, frame.top + inside + behind
            canvas.stack(clip, Box(x, y, width * scale, height * scale))
        left, tallest = left + frame.width + gap, max(tallest, frame.height)


def draw_panel(canvas: Canvas, place: Box, heading: str, how: str, figure: str, *, color: str) -> Box:
    """Draw a panel with its title, and return the place for what it shows."""
    canvas.draw.rounded_rectangle(place.corners, 12, fill="#f6f8fa", outline="#d0d7de", width=2)
    left, top = place.left + INSET, place.top
    end = canvas.write((left, top + 8), heading, size=HEADING, bold=True)
    canvas.write((left + end + 14, top + 15), how, color=QUIET)
    canvas.write((left, top + 56), figure, color=color, bold=True)
    return Box(left, top + TITLE, place.width - 2 * INSET, place.height - TITLE - INSET)


def draw(ways: Ways, figures: dict[str, Any]) -> Image.Image:
    """Return the picture."""
    clips = collated(ways, range(len(CLIPS)), packed=True)
    padded = [[number] for batch in ways.padded.batches() for number in batch]
    packed = list(ways.packs.batches())
    upper, lower = (TITLE + INSET + len(rows) * (ROW + ROW_GAP) - ROW_GAP for rows in (padded, packed))
    canvas = Canvas(WIDTH, HEAD + upper + GAP + lower + MARGIN)
    canvas.write((MARGIN, 16), "Nine clips of nine shapes and lengths", size=HEADING, bold=True)
    draw_clips(canvas, clips, Box(MARGIN, 76, WIDTH - 2 * MARGIN, HEAD - 96))
    left, right = MARGIN, MARGIN + PANEL + GAP
    second = HEAD + upper + GAP

    place, cut = Box(left, HEAD, PANEL, upper), f"{figures['squares_lost']:.0%} of the pixels cut off"
    draw_squares(canvas, clips, ways, draw_panel(canvas, place, "Cropped", "to squares", cut, color=BAD))
    place, wasted = Box(right, HEAD, PANEL, upper), f"{figures['padding']:.0%} of the tokens wasted"
    place = draw_panel(canvas, place, "Padded", "to the longest", wasted, color=BAD)
    draw_sequences(canvas, clips, ways, padded, place)
    place, cut = Box(left, second, PANEL, lower), f"{figures['buckets_lost']:.0%} of the pixels cut off"
    draw_batches(canvas, ways, draw_panel(canvas, place, "Bucketed", "one shape a batch", cut, color=GOOD))
    place, filled = Box(right, second, PANEL, lower), f"nothing cut off, {figures['packed_fill']:.0%} filled"
    place = draw_panel(canvas, place, "Packed", "end to end", filled, color=GOOD)
    draw_sequences(canvas, clips, ways, packed, place)
    return canvas.image


def make_parser() -> FlagParser:
    parser = FlagParser(__doc__)
    parser.add_argument("--figure", type=Path, required=True, help="PNG file to write.")
    parser.add_argument("--output", type=Path, help="JSON file for the figures.")
    return parser


def main(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = plan_ways(write_clips(Path(folder)))
        figures = {**machine("av", "numpy", "pillow"), **ways.figures()}
        picture = draw(ways, figures)
    with complete_file(args.figure) as partial:
        picture.quantize(COLORS).save(partial, format="png", optimize=True)
    report(figures, args.output)


if __name__ == "__main__":
    run_script(main, make_parser)
