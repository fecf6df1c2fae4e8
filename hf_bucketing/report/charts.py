"""Charts by matplotlib: inline SVG that takes fonts and colours from the stylesheet of its page, or PNG files."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from ..files import complete_file
from .samples import Histogram

if TYPE_CHECKING:
    from markupsafe import Markup
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure, SubFigure

COLOURS = ("#0072b2", "#d97000", "#009e73", "#b8518f", "#666666", "#56b4e9", "#a6611a", "#c22f4e")
"""Colours of series on white paper, after Okabe and Ito; pages have others where the browser is dark."""
_QUIET, _RULE = "#59636e", "#d5dae0"
_VARIABLES = {colour: f"--c{number}" for number, colour in enumerate(COLOURS)} | {_QUIET: "--quiet", _RULE: "--rule"}
"""Variables of the stylesheet that hold the colours of a chart in a page."""
_UNUSED = re.compile(r"""\s(?:id|clip-path)="[^"]*"|font[a-z-]*:[^;"]*;? ?|\stransform="rotate\(-0[^"]*\"""")
"""What matplotlib writes into the tags of an SVG and a page does not need: names, clipping of whole shapes, fonts."""

WIDTH, _HEIGHT = 480, 280
"""Pixels of a chart in a page, where it is not scaled."""
_LARGEST_LETTERS, _LETTERS = 14, 10
"""Sizes of letters on a phone, for which charts in pages are laid out, and in files."""
_MOST_POINTS = 400
"""Points of a line; a longer one is thinned, its first and last point kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """A chart that can be drawn into a page and into a file.

    Attributes:
        title (`str`): Its title.
        note (`str`): How to read it.
        alt (`str`): What it shows, for those who do not see it.
        draw (callable): Function that draws it into matplotlib's axes.
        legend (`tuple` of `(name, class)`): Names of the series, and the class of the stylesheet that colours each.
        height (`float`): Height in pixels beside a width of [`WIDTH`].
    """

    title: str
    note: str = ""
    alt: str
    draw: Callable[[Axes], None]
    legend: tuple[tuple[str, str], ...] = ()
    height: float = _HEIGHT

    @property
    def svg(self) -> Markup:
        """The chart as an element of a page."""
        from markupsafe import Markup
        from matplotlib.figure import Figure

        with _style(_LARGEST_LETTERS):
            figure = Figure(figsize=(WIDTH / 72, self.height / 72), frameon=False, layout="constrained")
            self.draw(_axes(figure))
            file = StringIO()
            figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
        inside = file.getvalue().partition("<svg")[2].partition(">")[2].removesuffix("</svg>\n")
        inside = re.sub(r"<defs>.*?</defs>|</?g\b[^>]*>|\n\s*", "", inside, flags=re.DOTALL)
        shape = Markup('<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {:g}">{}</svg>')
        return shape.format(self.alt, WIDTH, self.height, Markup(re.sub("<[^>]*>", _short_tag, inside)))


class Line(NamedTuple):
    """A line of a chart, through its finite points.

    Attributes:
        name (`str`): Its name in the legend; empty for none.
        x (array of `float`, shape `(n,)`): Places, ascending.
        y (array of `float`, shape `(n,)`): Values.
        colour (`int`): Number of its colour; after the last colour, the first comes again.
        style (`"line"`, `"faint"` or `"dots"`): A line, a thin pale one, or a dashed one with dots.
    """

    name: str
    x: npt.NDArray[np.floating]
    y: npt.NDArray[np.floating]
    colour: int = 0
    style: str = "line"


def save_charts(path: Path, charts: Sequence[Chart], *, columns: int = 1) -> None:
    """Draw charts with their titles, notes and legends as one PNG file, row by row."""
    from matplotlib.figure import Figure

    rows = [charts[start : start + columns] for start in range(0, len(charts), columns)]
    heights = [max(chart.height for chart in row) + 80 for row in rows]
    with _style(_LETTERS):
        figure = Figure(figsize=(columns * WIDTH / 72, sum(heights) / 72), layout="constrained")
        parts = figure.subfigures(len(rows), columns, height_ratios=heights, squeeze=False)
        for chart, part in zip(charts, parts.flat, strict=False):
            axes = _axes(part)
            chart.draw(axes)
            part.suptitle(chart.title)
            axes.set_title(fill(chart.note, 85), fontsize=_LETTERS - 2, loc="left")
            if chart.legend:
                part.legend(loc="outside lower center", ncols=2, frameon=False)
        with complete_file(path) as partial:
            figure.savefig(partial, dpi=120, format="png")


def histogram_chart(
    histogram: Histogram,
    *,
    title: str,
    x_label: str,
    y_label: str,
    note: str = "",
    colours: Sequence[int] = (0, 1),
    marks: Mapping[str, Sequence[float]] | None = None,
) -> Chart:
    """Draw groups of a histogram over each other, on a logarithmic axis of places, without those of no sample.

    Args:
        histogram ([`Histogram`]): Counts.
        title (`str`): Title of the chart.
        x_label (`str`): Title and unit of the axis of places.
        y_label (`str`): Title of the axis of counts.
        note (`str`): How to read the chart.
        colours (sequence of `int`): Colour of each group.
        marks (mapping of `str` to sequence of `float`, *optional*): Places that are marked above the counts, by name.
    """
    edges = histogram.edges
    groups = [
        (f"{name} ({sum(counts):,})", counts, colour)
        for (name, counts), colour in zip(histogram.counts.items(), colours, strict=True)
        if any(counts)
    ]
    rugs = [
        (f"{name} ({len(places)})", places, 4 + number)
        for number, (name, places) in enumerate((marks or {}).items())
        if places
    ]

    def draw(axes: Axes) -> None:
        for name, counts, colour in groups:
            steps = axes.stairs(counts, edges, fill=True, linewidth=1, label=name, clip_on=False)
            steps.set(facecolor=(COLOURS[colour], 0.45), edgecolor=COLOURS[colour])
        for row, (name, places, colour) in enumerate(rugs):
            ends, shares = (0.95 - 0.07 * row, 1 - 0.07 * row), axes.get_xaxis_transform()
            axes.vlines(places, *ends, COLOURS[colour], linewidth=1, transform=shares, clip_on=False, label=name)
        most = max((max(counts) for _, counts, _ in groups), default=0)
        axes.set(ylim=(0, max(most, 5) * (1.05 + 0.1 * len(rugs))), xlabel=x_label, ylabel=y_label)
        _put_ticks(axes.yaxis)
        marked = [*edges, *(place for _, places, _ in rugs for place in places)]
        _make_logarithmic(axes, min(marked), max(marked))

    return Chart(
        title=title,
        note=note,
        alt=f"{title}: histogram of the samples; the numbers are in the file of --json.",
        draw=draw,
        legend=tuple((name, f"s{colour}") for name, _, colour in [*groups, *rugs]),
    )


def line_chart(lines: Sequence[Line], *, title: str, alt: str, x_label: str, y_label: str, note: str = "") -> Chart:
    """Draw lines over an axis of values that begins at 0, or at their least one if that is negative.

    Args:
        lines (sequence of [`Line`]): Lines; those without a finite point are not drawn.
        title (`str`): Title of the chart.
        alt (`str`): What the chart shows, for those who do not see it.
        x_label (`str`): Title and unit of the axis of places.
        y_label (`str`): Title and unit of the axis of values.
        note (`str`): How to read the chart.

    The axis of values ends at the largest value that is not of a faint line, or where 98 % of a faint line lie below;
    points above it are drawn at its end.
    """
    finite = [
        line._replace(x=line.x[known], y=line.y[known], colour=line.colour % len(COLOURS))
        for line in lines
        if (known := np.isfinite(line.y)).any()
    ]
    tops = [float(np.quantile(line.y, 0.98) if line.style == "faint" else line.y.max()) for line in finite]
    bottom, top = min([0.0, *(float(line.y.min()) for line in finite)]), max([0.0, *tops]) * 1.05 or 1
    end = max((float(line.x.max()) for line in finite), default=0) or 1

    def draw(axes: Axes) -> None:
        for line in sorted(finite, key=lambda line: line.style != "faint"):
            kept = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), _MOST_POINTS)).round().astype(int))
            x, y, colour = line.x[kept], np.minimum(line.y[kept], top), COLOURS[line.colour]
            (drawn,) = axes.plot(x, y, color=colour, linewidth=2, clip_on=False, label=line.name or None)
            if line.style == "faint":
                drawn.set(linewidth=1, alpha=0.35)
            if line.style == "dots":
                drawn.set(linewidth=1.5, linestyle="--")
            if line.style == "dots" or len(x) == 1:
                # Very short strokes with round ends: markers would need names that are unique in the page.
                axes.plot(
                    [x, x + end / 1e4], [y, y], color=colour, linewidth=6.5, solid_capstyle="round", clip_on=False
                )
        axes.set(xlim=(0, end), ylim=(bottom, top), xlabel=x_label, ylabel=y_label)
        _put_ticks(axes.xaxis)
        _put_ticks(axes.yaxis)

    legend = tuple((line.name, f"s{line.colour} {line.style}") for line in finite if line.name)
    return Chart(title=title, note=note, alt=alt, draw=draw, legend=legend)


def bar_chart(
    bars: Sequence[tuple[str, Sequence[float], str]],
    *,
    title: str,
    x_label: str,
    alt: str = "",
    note: str = "",
    parts: Sequence[str] = (),
    colours: Sequence[int] = (),
    limit: tuple[float, str] | None = None,
) -> Chart:
    """Draw a horizontal bar per label, each of one or several parts, with its text behind it.

    Args:
        bars (sequence of `(label, values, text)`): Values not negative, as many for every bar; those not
            finite have no length.
        title (`str`): Title of the chart.
        x_label (`str`): Title and unit of the axis.
        alt (`str`): What the chart shows, for those who do not see it; by default its title, labels and texts.
        note (`str`): How to read the chart.
        parts (sequence of `str`, *optional*): Names of the parts, for the legend; those that no bar has are omitted.
        colours (sequence of `int`, *optional*): Colour of each bar of one part.
        limit (`tuple` of `(value, text)`, *optional*): Value that a dashed line marks; bars are cut at three times it.
    """
    labels, texts = [label for label, _, _ in bars], [text for _, _, text in bars]
    lengths = np.array([values for _, values, _ in bars], np.float64).reshape(len(bars), len(parts) or 1)
    lengths = np.where(np.isfinite(lengths), lengths, 0.0)
    if limit is not None:
        lengths = np.diff(np.minimum(lengths.cumsum(1), 3 * limit[0]), prepend=0, axis=1)
    named = {part: name for part, name in enumerate(parts) if lengths[:, part].any()}

    def draw(axes: Axes) -> None:
        places, starts = np.arange(len(bars)), np.zeros(len(bars))
        for part, sizes in enumerate(lengths.T):
            drawn = np.flatnonzero(sizes)
            colour = [COLOURS[colours[bar] % len(COLOURS) if colours else part] for bar in drawn.tolist()]
            axes.barh(drawn, sizes[drawn], 0.68, starts[drawn], color=colour, label=named.get(part), clip_on=False)
            starts = starts + sizes
        for place, end, text in zip(places, starts, texts, strict=True):
            axes.annotate(text, (end, place), (6, 0), textcoords="offset points", va="center_baseline")
        axes.set_yticks(places, labels)
        longest = max([*starts.tolist(), 0 if limit is None else limit[0]], default=0) or 1
        if limit is not None:
            axes.axvline(limit[0], color=_QUIET, linewidth=1, linestyle="--")
            axes.annotate(limit[1], (limit[0], 1), (0, 2), ("data", "axes fraction"), "offset points", ha="center")
        axes.set(ylim=(max(len(bars), 1) - 0.5, -0.5), xlim=(0, longest), xlabel=x_label)
        axes.grid(visible=False, axis="y")
        _put_ticks(axes.xaxis, most=4)

    return Chart(
        title=title,
        note=note,
        alt=alt or f"{title}: {', '.join(f'{label} {text}' for label, _, text in bars)}",
        draw=draw,
        legend=tuple((name, f"s{part}") for part, name in named.items()),
        height=62 + 24 * max(len(bars), 1),
    )


def heat_map(
    changes: npt.NDArray[np.floating],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    title: str,
    x_label: str,
    alt: str,
    note: str = "",
) -> Chart:
    """Draw a table of relative changes, whose cells are the stronger coloured the larger they are.

    Args:
        changes (array of `float`, shape `(len(rows), len(columns))`): Changes, such as -0.1 for a tenth less; cells
            that are not finite stay empty.
        rows (sequence of `str`): Names of the rows.
        columns (sequence of `str`): Names of the columns.
        title (`str`): Title of the chart.
        x_label (`str`): Title of the columns.
        alt (`str`): What the chart shows, for those who do not see it.
        note (`str`): How to read the chart.
    """
    largest = float(np.nanmax(np.abs(changes), initial=0)) or 1.0
    less, more = COLOURS[2], COLOURS[7]

    def draw(axes: Axes) -> None:
        for (row, column), change in np.ndenumerate(changes):
            if np.isfinite(change):
                colour = (less if change < 0 else more, 0.65 * abs(float(change)) / largest)
                axes.barh(row, 0.96, 0.92, column - 0.48, facecolor=colour, clip_on=False)
                axes.annotate(f"{change:+.0%}", (column, row), ha="center", va="center_baseline")
        axes.set_yticks(range(len(rows)), rows)
        axes.set_xticks(range(len(columns)), columns)
        axes.set(xlim=(-0.5, len(columns) - 0.5), ylim=(len(rows) - 0.5, -0.5), xlabel=x_label)
        axes.grid(visible=False)

    legend = (("less", "s2"), ("more", "s7"))
    return Chart(title=title, note=note, alt=alt, draw=draw, legend=legend, height=72 + 24 * len(rows))


def short(value: float) -> str:
    """Return a tick's number, with k, M, G or T for large ones.

    Example:
        >>> short(0.25), short(1500), short(2e6), short(20)
        ('0.25', '1.5k', '2M', '20')
    """
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{letter}"
    return f"{value:.4g}"


def _short_tag(tag: re.Match[str]) -> str:
    """Return a tag of an SVG in few letters, with the colours of the page's stylesheet."""
    text = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), _UNUSED.sub("", tag[0]))
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return text


def _style(letters: float) -> AbstractContextManager[None]:
    from matplotlib import rc_context

    return rc_context({
        "font.family": "DejaVu Sans", "font.size": letters,
        "axes.labelsize": letters, "xtick.labelsize": letters, "ytick.labelsize": letters,
        "axes.labelcolor": _QUIET, "axes.grid": True, "grid.color": _RULE, "axes.axisbelow": True,
        "svg.fonttype": "none", "text.parse_math": False,
    })  # fmt: skip


def _axes(figure: Figure | SubFigure) -> Axes:
    axes = figure.add_subplot()
    axes.set_frame_on(False)
    axes.tick_params(bottom=False, left=False)
    return axes


def _put_ticks(axis: Axis, *, most: int = 5) -> None:
    """Put ticks at round numbers."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(lambda value, _: short(value))


def _make_logarithmic(axes: Axes, low: float, high: float) -> None:
    """Make the axis of places logarithmic, with ticks at round numbers, more of them if the range is short."""
    from matplotlib.ticker import LogLocator, NullLocator

    axes.set_xscale("log")
    decades = math.log10(high / low)
    steps = next((steps for steps in ((1,), (1, 3), (1, 2, 5)) if decades * len(steps) > 3), (1, 1.5, 2, 3, 5, 7))
    axes.xaxis.set_major_locator(LogLocator(subs=steps, numticks=50))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.set_xlim(low, high)
