"""Host. The report as one HTML page that needs nothing else: its figures, and two pictures as inline SVG."""

import html
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.aot.report import text_of

COLOURS = ("#444444", "#9ecae1", "#4292c6", "#2171b5", "#08306b", "#e6550d", "#31a354")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 640, 360, 70, 45, 20, 150

_STYLE = """body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:60rem;color:#222;padding:0 1rem}
pre{background:#f6f6f6;padding:1rem;overflow-x:auto;font-size:13px}svg{max-width:100%;height:auto}
h1{font-size:1.4rem}h2{font-size:1.1rem}"""


def page_of(report: Mapping[str, Any], *, made: str) -> str:
    """The page. made: when and with what, a line."""
    title = f"{report['model']} on {report['topology']}"
    speeds = report["speeds"]
    pictures = [f"<h2>Memory of a device</h2>{memory_picture(report['fit'])}"]
    if speeds:
        lines = {"plain": [(one["batch"], one["plain_tokens_per_s_per_chip"]) for one in speeds]}
        for length in speeds[0]["at_acceptance_length"]:
            lines[f"{length} tokens a round"] = [
                (one["batch"], one["at_acceptance_length"][length]["tokens_per_s_per_chip"]) for one in speeds
            ]
        pictures.append(
            f"<h2>Tokens a second of a chip</h2>{line_picture(lines, 'requests at once', 'tokens/s a chip')}"
        )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body><h1>{html.escape(title)}</h1>\n"
        f"{''.join(pictures)}\n<h2>Report</h2><pre>{html.escape(text_of(dict(report)))}</pre>\n"
        f"<p>{html.escape(made)}</p></body></html>\n"
    )


def line_picture(lines: Mapping[str, Sequence[tuple[float, float]]], x_label: str, y_label: str) -> str:
    """Lines over a logarithmic x axis, as SVG.

    Args:
        lines: {name: [(x > 0, y >= 0)]}, each with a point at least.
    """
    xs = sorted({x for points in lines.values() for x, _ in points})
    top = _round_up(max(y for points in lines.values() for _, y in points))
    low, span = math.log2(xs[0]), max(math.log2(xs[-1]) - math.log2(xs[0]), 1e-9)
    width, height = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def at(x: float, y: float) -> tuple[float, float]:
        return LEFT + width * (math.log2(x) - low) / span, TOP + height * (1 - y / top)

    parts = []
    for index in range(5):
        y = top * index / 4
        _, v = at(xs[0], y)
        parts.append(f'<line x1="{LEFT}" y1="{v:.1f}" x2="{LEFT + width}" y2="{v:.1f}" stroke="#ddd"/>')
        parts.append(_text(LEFT - 8, v + 4, f"{y:g}", "end"))
    for x in xs:
        u, _ = at(x, 0)
        parts.append(_text(u, TOP + height + 18, f"{x:g}", "middle"))
    for index, (name, points) in enumerate(lines.items()):
        colour = COLOURS[index % len(COLOURS)]
        path = " ".join("{:.1f},{:.1f}".format(*at(x, y)) for x, y in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [
            '<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*at(x, y), colour) for x, y in points
        ]  # fmt: skip
        parts.append(f'<rect x="{LEFT + width + 15}" y="{TOP + 20 * index}" width="12" height="12" fill="{colour}"/>')
        parts.append(_text(LEFT + width + 32, TOP + 20 * index + 11, name, "start"))
    parts.append(_text(LEFT + width / 2, HEIGHT - 6, x_label, "middle"))
    parts.append(_text(14, TOP - 6, y_label, "start"))
    return _svg(WIDTH, HEIGHT, parts)


def memory_picture(fit: Mapping[str, Any]) -> str:
    """One bar: what the memory of a device holds."""
    pieces = [
        ("target", fit["target_bytes"]),
        ("drafter", fit["draft_bytes"]),
        ("tables", fit["table_bytes"]),
        ("temporaries", fit["temp_bytes"]),
    ]
    used = sum(size for _, size in pieces)
    pieces.append(("pages", max(fit["plan_bytes"] - used, 0)))
    whole = max(fit["memory_bytes"], used)
    parts, x, width = [], 10.0, WIDTH - 20
    for index, (name, size) in enumerate(pieces):
        part = width * size / whole
        parts.append(f'<rect x="{x:.1f}" y="10" width="{part:.1f}" height="30" fill="{COLOURS[index]}"/>')
        x += part
        left = 10 + index * (width / len(pieces))
        parts.append(f'<rect x="{left:.1f}" y="58" width="12" height="12" fill="{COLOURS[index]}"/>')
        parts.append(_text(left + 17, 69, f"{name} {size / 1e9:.1f} GB", "start"))
    end = 10 + width * fit["memory_bytes"] / whole
    parts.append(f'<line x1="{end:.1f}" y1="4" x2="{end:.1f}" y2="46" stroke="#c00" stroke-width="2"/>')
    return _svg(WIDTH, 80, parts)


def _svg(width: int, height: int, parts: Sequence[str]) -> str:
    inside = "".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'font-family="sans-serif" font-size="12">{inside}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _round_up(value: float) -> float:
    """To one or two figures, so that quarters of it are short to write."""
    if value <= 0:
        return 1.0
    unit = 10.0 ** math.floor(math.log10(value))
    return next(step * unit for step in (1, 2, 4, 6, 8, 10) if step * unit >= value)
