"""The few pieces of HTML that the page is made of. Text is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from string import Template
from typing import Final


@dataclass(frozen=True, slots=True)
class Html:
    """Markup that is safe as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Number:
    """A number as people read it, with the exact one behind it for machines."""

    value: float | None
    digits: int = 0  # after the point
    missing: str = ""  # what stands for None; nothing: a dash


Cell = Html | Number | str


def html(cell: Cell) -> str:
    """Markup of anything that may stand in a page.

    >>> html("<b>"), html(Number(1234.5678, 1))
    ('&lt;b&gt;', '<data value="1234.5678">1,234.6</data>')
    """
    if isinstance(cell, Html):
        return cell.text
    if isinstance(cell, str):
        return escape(cell)
    if cell.value is None:
        return f'<span class="missing">{escape(cell.missing) or "&ndash;"}</span>'
    return f'<data value="{cell.value!r}">{cell.value:,.{cell.digits}f}</data>'


def link(target: str, text: str) -> Html:
    return Html(f'<a href="#{escape(target)}">{escape(text)}</a>')


def swatch(colour: str, text: str) -> Html:
    """A text with the colour that it has in the plots."""
    return Html(f'<span class="key"><i style="background:{escape(colour)}"></i>{escape(text)}</span>')


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], *, total: Sequence[Cell] | None = None) -> str:
    """A table whose figures stand right. `heads` may have a second line, after a line break: its unit."""
    shown = list(rows)
    sides = _sides(shown, len(heads))
    parts = ["<div class='wide'><table><thead>", _row("th", [Html(_head(head)) for head in heads], sides)]
    parts.append("</thead><tbody>")
    parts += [_row("td", row, sides) for row in shown]
    parts.append("</tbody>")
    if total is not None:
        parts.append(f"<tfoot>{_row('td', total, sides)}</tfoot>")
    return "".join([*parts, "</table></div>"])


def facts(pairs: Iterable[tuple[str, Cell]]) -> str:
    """Names and what they are, as a list."""
    items = "".join(f"<div><dt>{escape(name)}</dt><dd>{html(cell)}</dd></div>" for name, cell in pairs)
    return f"<dl>{items}</dl>"


def paragraph(text: Cell, kind: str = "") -> str:
    return f'<p class="{escape(kind)}">{html(text)}</p>' if kind else f"<p>{html(text)}</p>"


def picture(drawing: str, caption: str) -> str:
    """A plot, given as SVG, and a sentence on how to read it."""
    return f"<figure>{drawing}<figcaption>{escape(caption)}</figcaption></figure>"


def page(title: str, content: str) -> str:
    return _PAGE.substitute(title=escape(title), style=_STYLE, content=content)


def _head(head: str) -> str:
    name, _, unit = head.partition("\n")
    return escape(name) + (f'<span class="unit">{escape(unit)}</span>' if unit else "")


def _sides(rows: Sequence[Sequence[Cell]], width: int) -> list[str]:
    """Columns of figures stand right."""
    return [' class="figure"' if any(isinstance(row[place], Number) for row in rows) else "" for place in range(width)]


def _row(kind: str, cells: Sequence[Cell], sides: Sequence[str]) -> str:
    inner = "".join(f"<{kind}{side}>{html(cell)}</{kind}>" for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{inner}</tr>"


_PAGE: Final = Template(
    """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>$title</title>
<style>$style</style>
</head>
<body>
<main>
$content
</main>
</body>
</html>
"""
)

_STYLE: Final = """
:root {
  --ink: #1b1f24; --faint: #5b6370; --line: #d5d9de; --paper: #ffffff; --ground: #f6f7f8; --link: #0b5cad;
  --note: #fff4d6; --note-line: #d9a400;
  --sans: system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
  --serif: Charter, "Bitstream Charter", "Iowan Old Style", Georgia, "Liberation Serif", serif;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e6e8eb; --faint: #a3abb6; --line: #3a4048; --paper: #1b1e22; --ground: #131518; --link: #7db8f5;
    --note: #352c12; --note-line: #b58a0a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); font: 17px/1.55 var(--serif); }
main { max-width: 72rem; margin: 0 auto; padding: 2.5rem 2rem 4rem; background: var(--paper); }
h1, h2, h3, dt, dd, table, figure, summary { font-family: var(--sans); }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 .4rem; letter-spacing: -.01em; }
h2 { font-size: 1.35rem; margin: 3rem 0 .6rem; padding-top: 1.2rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1.02rem; margin: 2rem 0 .5rem; }
p { max-width: 46rem; margin: .5rem 0; }
a { color: var(--link); text-decoration-thickness: 1px; text-underline-offset: 2px; }
.lead { color: var(--faint); margin-bottom: 1.2rem; }
.note { background: var(--note); border-left: 4px solid var(--note-line); padding: .6rem .9rem; border-radius: 3px; }
dl { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .8rem 1.6rem; margin: 1rem 0; }
dt { font-size: .74rem; color: var(--faint); text-transform: uppercase; letter-spacing: .05em; }
dd { margin: 0; font-size: .96rem; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: .8rem 0; }
table { border-collapse: collapse; font-size: .82rem; line-height: 1.35; font-variant-numeric: tabular-nums; }
th, td { padding: .34rem .5rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
th { vertical-align: bottom; border-bottom: 1.5px solid var(--ink); font-weight: 600; white-space: nowrap; }
th:first-child, td:first-child { padding-left: 0; white-space: nowrap; }
tfoot td { border-top: 1.5px solid var(--ink); border-bottom: 0; font-weight: 600; }
.figure { text-align: right; white-space: nowrap; }
td:not(.figure) { overflow-wrap: anywhere; }
.unit { display: block; font-weight: 400; font-size: .74rem; color: var(--faint); }
.missing { color: var(--faint); }
.key { display: inline-block; max-width: 11rem; vertical-align: bottom; white-space: nowrap; }
.key { overflow: hidden; text-overflow: ellipsis; }
.key i { display: inline-block; width: .75em; height: .75em; margin-right: .5em; border-radius: 2px; }
figure { margin: 1.2rem 0 1.8rem; }
figure svg { display: block; max-width: 100%; height: auto; overflow: visible; }
figure svg text { font-family: var(--sans) !important; }
figcaption { max-width: 46rem; margin-top: .5rem; font-size: .88rem; line-height: 1.45; color: var(--faint); }
details { margin: 1.4rem 0; }
summary { cursor: pointer; font-size: .92rem; }
pre { overflow-x: auto; font-size: .78rem; line-height: 1.4; background: var(--ground); padding: .8rem; }
@media (max-width: 40rem) { main { padding: 1.5rem 1rem 3rem; } }
@media print {
  :root { --ink: #000; --faint: #444; --line: #ccc; --paper: #fff; --ground: #fff; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  section + section { break-before: page; }
  h2 { margin-top: 0; }
  figure, tr, .note { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .wide { overflow: visible; }
  table { font-size: 7.5pt; }
  details { display: none; }
}
"""
