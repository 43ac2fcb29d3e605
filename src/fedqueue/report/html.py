"""The few pieces of HTML that the page is made of. Text is escaped here, and nowhere else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib import resources
from string import Template


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
    template = (resources.files("fedqueue.report") / "page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=escape(title), content=content)


def _head(head: str) -> str:
    name, _, unit = head.partition("\n")
    return escape(name) + (f'<span class="unit">{escape(unit)}</span>' if unit else "")


def _sides(rows: Sequence[Sequence[Cell]], width: int) -> list[str]:
    """Columns of figures stand right."""
    return [' class="figure"' if any(isinstance(row[place], Number) for row in rows) else "" for place in range(width)]


def _row(kind: str, cells: Sequence[Cell], sides: Sequence[str]) -> str:
    inner = "".join(f"<{kind}{side}>{html(cell)}</{kind}>" for cell, side in zip(cells, sides, strict=True))
    return f"<tr>{inner}</tr>"
