"""Charts as inline SVG, whose text scales with the page and whose colours are those of its stylesheet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from .histograms import Histogram

if TYPE_CHECKING:
    from markupsafe import Markup

WIDTH, HEIGHT = 480, 280
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 12, 50
_LETTER, _WIDE_LETTER = 9.0, 13.6
"""Widths of letters on a phone, where they are largest, in the units of WIDTH."""
_WIDE = frozenset("×÷%mwMW")
_MOST_POINTS = 400
"""Points of a line; a longer one is thinned, its first and last point kept."""


class Chart(NamedTuple):
    """A chart and its legend.

    Attributes:
        svg (`Markup`): The chart.
        legend (`tuple` of `(name, class)`): Names of the series, and the class of the stylesheet that colours each.
    """

    svg: Markup
    legend: tuple[tuple[str, str], ...] = ()


class Line(NamedTuple):
    """A line of a chart, through its finite points.

    Attributes:
        name (`str`): Its name in the legend; empty for none.
        x (array of `float`, shape `(n,)`): Places, ascending.
        y (array of `float`, shape `(n,)`): Values.
        colour (`int`): Number of its colour.
        style (`"line"`, `"faint"` or `"dots"`): A line, a thin pale one, or a dashed one with dots.
    """

    name: str
    x: npt.NDArray[np.floating]
    y: npt.NDArray[np.floating]
    colour: int = 0
    style: str = "line"


class _Scale(NamedTuple):
    """Map values from `low` to `high` to places from `start` to `end`."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, value = (
            math.log(number) if self.logarithmic else number for number in (self.low, self.high, value)
        )
        return round(self.start + (value - low) / (high - low) * (self.end - self.start), 1)

    def ticks(self) -> list[float]:
        if not self.logarithmic:
            return even_ticks(self.low, self.high)
        for steps in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [step * 10.0**power for power in powers for step in steps]
            found = [tick for tick in found if self.low <= tick <= self.high]
            if len(found) >= 4:
                break
        if len(found) < 3:
            found = even_ticks(self.low, self.high)
        every = math.ceil(len(found) / 7)
        return found[::every]


def even_ticks(low: float, high: float, *, most: int = 5) -> list[float]:
    """Return at most about `most` round numbers, evenly spaced, from low to high.

    Example:
        >>> even_ticks(0, 23)
        [0.0, 5.0, 10.0, 15.0, 20.0]
    """
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.10g}") for number in range(first, last + 1)]


def histogram_chart(
    histogram: Histogram, *, alt: str, x_label: str, y_label: str, colours: Sequence[int] = (0, 1)
) -> Chart:
    """Draw groups of a histogram over each other, on a logarithmic axis of places, without those of no sample.

    Args:
        histogram ([`Histogram`]): Counts.
        alt (`str`): What the chart shows, for those who do not see it.
        x_label (`str`): Title and unit of the axis of places.
        y_label (`str`): Title of the axis of counts.
        colours (sequence of `int`): Colour of each group.
    """
    edges = histogram.edges
    groups = [
        (name, counts, colour)
        for (name, counts), colour in zip(histogram.counts.items(), colours, strict=True)
        if any(counts)
    ]
    most = max((max(counts) for _, counts, _ in groups), default=0)
    x = _Scale(edges[0], edges[-1], _LEFT, WIDTH - _RIGHT, True)
    y = _Scale(0, max(most, 5) * 1.05, HEIGHT - _BOTTOM, _TOP)  # from 5 on, ticks are whole numbers
    parts = [_axes(x, y, x_label=x_label, y_label=y_label)]
    for _, counts, colour in groups:
        places = [x(edge) for edge in edges]
        path = [f"M{places[0]} {y(0)}"]
        for count, end in zip(counts, places[1:], strict=True):
            path.append(f"V{y(count)}H{end}")
        parts.append(_markup('<path class="area s{}" d="{}V{}Z"/>', colour, "".join(path), y(0)))
    legend = tuple((f"{name} ({sum(counts):,})", f"s{colour}") for name, counts, colour in groups)
    return Chart(_svg(parts, alt=alt), legend)


def line_chart(lines: Sequence[Line], *, alt: str, x_label: str, y_label: str) -> Chart:
    """Draw lines over an axis of values that begins at 0, or at their least one if that is negative.

    Args:
        lines (sequence of [`Line`]): Lines; those without a finite point are not drawn.
        alt (`str`): What the chart shows, for those who do not see it.
        x_label (`str`): Title and unit of the axis of places.
        y_label (`str`): Title and unit of the axis of values.

    The axis of values ends at the largest value that is not of a faint line, or where 98 % of a faint line lie below;
    points above it are drawn at its end.
    """
    finite = [line._replace(x=line.x[ok], y=line.y[ok]) for line in lines if (ok := np.isfinite(line.y)).any()]
    x = _Scale(0, max((float(line.x.max()) for line in finite), default=0) or 1, _LEFT, WIDTH - _RIGHT)
    tops = [float(np.quantile(line.y, 0.98) if line.style == "faint" else line.y.max()) for line in finite]
    bottom = min([0.0, *(float(line.y.min()) for line in finite)])
    y = _Scale(bottom, max([0.0, *tops]) * 1.05 or 1, HEIGHT - _BOTTOM, _TOP)
    parts = [_axes(x, y, x_label=x_label, y_label=y_label)]
    for line in sorted(finite, key=lambda one: one.style != "faint"):
        kept = np.unique(np.linspace(0, len(line.x) - 1, min(len(line.x), _MOST_POINTS)).round().astype(int))
        points = [
            (x(px), y(min(py, y.high))) for px, py in zip(line.x[kept].tolist(), line.y[kept].tolist(), strict=True)
        ]
        path = " ".join(f"{px},{py}" for px, py in points)
        parts.append(_markup('<polyline class="{} s{}" points="{}"/>', line.style, line.colour, path))
        if line.style == "dots" or len(points) == 1:
            parts += [_markup('<circle class="dot s{}" cx="{}" cy="{}" r="3.2"/>', line.colour, *at) for at in points]
    legend = tuple((line.name, f"s{line.colour} {line.style}") for line in finite if line.name)
    return Chart(_svg(parts, alt=alt), legend)


def bar_chart(
    bars: Sequence[tuple[str, Sequence[float], str]],
    *,
    alt: str,
    x_label: str,
    parts: Sequence[str] = (),
    colours: Sequence[int] = (),
) -> Chart:
    """Draw a horizontal bar per label, each of one or several parts, with its text behind it.

    Args:
        bars (sequence of `(label, values, text)`): Values not negative, as many for every bar; those not
            finite have no length.
        alt (`str`): What the chart shows, for those who do not see it.
        x_label (`str`): Title and unit of the axis.
        parts (sequence of `str`, *optional*): Names of the parts, for the legend; those that no bar has are omitted.
        colours (sequence of `int`, *optional*): Colour of each bar of one part.
    """
    row = 24
    left = 12 + max((_width(label) for label, _, _ in bars), default=0)
    right = 12 + max((_width(text) for _, _, text in bars), default=0)
    values = [[value if math.isfinite(value) else 0.0 for value in own] for _, own, _ in bars]
    height = _TOP + row * max(len(bars), 1) + _BOTTOM
    x = _Scale(0, max([sum(parts) for parts in values], default=0) or 1, left, WIDTH - right)
    pieces = []
    for tick in even_ticks(x.low, x.high, most=3 if left > WIDTH / 3 else 5):
        pieces.append(_markup('<path class="grid" d="M{} {}V{}"/>', x(tick), _TOP, height - _BOTTOM))
        pieces.append(_text(x(tick), height - _BOTTOM + 18, short(tick), "middle"))
    pieces.append(_text((left + WIDTH - right) / 2, height - 8, x_label, "middle", "title"))
    for number, (label, _, text) in enumerate(bars):
        top, start = _TOP + number * row, 0.0
        pieces.append(_text(left - 7, top + row / 2 + 4.5, label, "end"))
        for part, value in enumerate(values[number]):
            colour = colours[number] if colours else part
            shape = (colour, x(start), top + 4, max(round(x(start + value) - x(start), 1), 0), row - 8)
            pieces.append(_markup('<rect class="bar s{}" x="{}" y="{}" width="{}" height="{}"/>', *shape))
            start += value
        pieces.append(_text(x(start) + 6, top + row / 2 + 4.5, text, "start"))
    legend = tuple(
        (name, f"s{number}") for number, name in enumerate(parts) if any(lengths[number] for lengths in values)
    )
    return Chart(_svg(pieces, alt=alt, height=height), legend)


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


def _width(text: str) -> float:
    return sum(_WIDE_LETTER if letter in _WIDE else _LETTER for letter in text)


def _axes(x: _Scale, y: _Scale, *, x_label: str, y_label: str) -> Markup:
    parts = []
    for tick in y.ticks():
        parts.append(_markup('<path class="grid" d="M{} {}H{}"/>', _LEFT, y(tick), WIDTH - _RIGHT))
        parts.append(_text(_LEFT - 7, y(tick) + 4.5, short(tick), "end"))
    for tick in x.ticks():
        parts.append(_markup('<path class="axis" d="M{} {}v4"/>', x(tick), HEIGHT - _BOTTOM))
        parts.append(_text(x(tick), HEIGHT - _BOTTOM + 18, short(tick), "middle"))
    parts.append(_markup('<path class="axis" d="M{} {}H{}"/>', _LEFT, HEIGHT - _BOTTOM, WIDTH - _RIGHT))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 8, x_label, "middle", "title"))
    middle = (HEIGHT - _BOTTOM + _TOP) / 2
    turned = '<text class="title" text-anchor="middle" transform="translate(13 {}) rotate(-90)">{}</text>'
    parts.append(_markup(turned, middle, y_label))
    return _joined(parts)


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> Markup:
    return _markup(
        '<text class="{}" x="{}" y="{}" text-anchor="{}">{}</text>', kind, round(x, 1), round(y, 1), anchor, text
    )


def _svg(parts: Sequence[Markup], *, alt: str, height: float = HEIGHT) -> Markup:
    shape = '<svg class="chart" role="img" aria-label="{}" viewBox="0 0 {} {}">{}</svg>'
    return _markup(shape, alt, WIDTH, height, _joined(parts))


def _joined(parts: Sequence[Markup]) -> Markup:
    return _markup("{}" * len(parts), *parts)


def _markup(template: str, *values: object) -> Markup:
    """Fill in values, escaped unless they are markup already."""
    from markupsafe import Markup

    return Markup(template).format(*values)
