"""Tables that keep words whole: on a terminal of any width, and as HTML in a notebook."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rich import box as boxes
from rich.box import Box
from rich.console import Console, ConsoleOptions, Group
from rich.table import Table
from rich.text import Text

Cell = str | Text


@dataclass(frozen=True)
class Grid:
    """A table that rich prints, and that has an HTML form.

    Words stay whole. A name that is wider than its column is broken after a dot or a comma. If the
    table is still too wide, columns are left out, and the caption names them.

    Attributes:
        title: the text above the table.
        columns: the headers.
        rows: the cells of each row, one for each column.
        caption: the text below the table; lines are separated by newlines.
        words: columns of words, which are aligned to the left and wrapped. The others are numbers.
        optional: columns that may be left out, the least important first.
        sections: indices of rows that a line follows.
        bold: indices of rows to emphasize.
        box: the lines between cells, of `rich.box`.
        show_header: whether the headers are printed.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    words: Collection[str] = ()
    optional: Sequence[str] = ()
    sections: Collection[int] = ()
    bold: Collection[int] = ()
    box: Box = boxes.HEAVY_HEAD
    show_header: bool = True

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        yield self._table(options.max_width)

    def html(self) -> str:
        """Return the table as HTML, with every value escaped."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        lines = [f"<table><caption>{_html(self.title)}</caption>"]
        lines += [f"<thead><tr>{head}</tr></thead>"] if self.show_header else []
        lines.append("<tbody>")
        for number, row in enumerate(self.rows):
            cells = ""
            for name, cell in zip(self.columns, row, strict=True):
                align = "left" if name in self.words else "right"
                text = _html(_plain(cell))
                text = f"<b>{text}</b>" if number in self.bold else text
                cells += f'<td style="text-align: {align}">{text}</td>'
            lines.append(f"<tr>{cells}</tr>")
        lines.append("</tbody></table>")
        lines += [f"<p>{_html(self.caption)}</p>"] if self.caption else []
        return "\n".join(lines)

    def _table(self, width: int) -> Table:
        """Return the table for a width, without the columns that do not fit."""
        shown, removable = list(range(len(self.columns))), list(self.optional)
        while (widths := self._widths(shown, width)) is None and removable:
            name = removable.pop(0)
            shown = [index for index in shown if self.columns[index] != name]
        out = [name for name in self.optional if name not in removable]
        notes = [self.caption] if self.caption else []
        notes += [f"no room for: {', '.join(out)}"] if out else []
        caption = "\n".join(notes)
        table = Table(
            title=self.title, caption=caption or None, box=self.box, show_header=self.show_header
        )
        for place, index in enumerate(shown):
            name, is_words = self.columns[index], self.columns[index] in self.words
            table.add_column(
                name if widths is None else _wrapped(name, widths[place]),
                justify="left" if is_words else "right",
                # The last resort on a terminal that is narrower than a word.
                overflow="fold",
                no_wrap=not is_words and widths is not None,
            )
        for number, row in enumerate(self.rows):
            cells = [
                _wrapped(row[index], widths[place]) if widths is not None else _text(row[index])
                for place, index in enumerate(shown)
            ]
            style = "bold" if number in self.bold else None
            table.add_row(*cells, style=style, end_section=number in self.sections)
        return table

    def _widths(self, shown: list[int], width: int) -> list[int] | None:
        """Return the width of each column, or None if they do not fit into `width`."""
        # A space on both sides of each cell, and the lines between cells.
        edges = 3 * len(shown) + 1
        least_widths, most = [], []
        for index in shown:
            name = self.columns[index]
            cells = [_plain(row[index]) for row in self.rows]
            widest = max((len(line) for cell in cells for line in cell.split("\n")), default=0)
            whole = cells if name in self.words else []
            pieces = [len(piece) for cell in whole for piece in _pieces(cell)]
            header = [len(word) for word in name.split()] if self.show_header else []
            least_widths.append(max([0 if whole else widest, *header, *pieces]))
            most.append(max(widest, len(name) if self.show_header else 0))
        spare = width - edges - sum(least_widths)
        if spare < 0:
            return None
        # Widen short columns first, so that only long columns wrap.
        for place in sorted(range(len(shown)), key=lambda place: most[place] - least_widths[place]):
            more = min(max(most[place] - least_widths[place], 0), spare)
            least_widths[place] += more
            spare -= more
        return least_widths


def _plain(cell: Cell) -> str:
    return cell.plain if isinstance(cell, Text) else cell


def _pieces(text: str) -> list[str]:
    """Return the parts of a text that stay whole: words, and names up to a dot or comma.

    Example:
        >>> _pieces("3 x model.layers.0-7,9")
        ['3', 'x', 'model.', 'layers.', '0-7,', '9']
    """
    return re.findall(r"[^\s.,;/]*[.,;/]+|[^\s.,;/]+", text)


def _text(cell: Cell) -> Text:
    return cell if isinstance(cell, Text) else Text(cell)


def _wrapped(cell: Cell, width: int) -> Text:
    """Return a cell with its lines broken between words, and inside words that are too wide."""
    text = _plain(cell)
    if max(map(len, text.split("\n"))) <= width:
        return _text(cell)
    lines = []
    for line in text.split("\n"):
        filled = ""
        for word in line.split():
            joined = f"{filled} {word}" if filled else word
            if len(joined) <= width:
                filled = joined
                continue
            if filled and len(word) <= width:
                lines.append(filled)
                filled = word
                continue
            filled += " " if filled else ""
            for piece in _pieces(word):
                if len(filled + piece) > width and filled.strip():
                    lines.append(filled.rstrip())
                    filled = ""
                filled += piece
        lines.append(filled)
    return Text("\n".join(lines), _text(cell).style)


def _html(text: str) -> str:
    return escape(text).replace("\n", "<br>")


def html_of(shown: Any) -> str:
    """Return an object that rich prints, or a text in lines, as HTML for a notebook.

    Args:
        shown: a `Grid`, a text, or a group of these and of objects with `_repr_html_`.
    """
    if isinstance(shown, Grid):
        return shown.html()
    if isinstance(shown, Group):
        return "\n".join(map(html_of, shown.renderables))
    if isinstance(shown, (str, Text)):
        return f"<p>{_html(_plain(shown))}</p>"
    html: str = shown._repr_html_()
    return html


def html_of_lines(text: str) -> str:
    """Return a title and lines of columns that two spaces separate as an HTML table."""
    title, *lines = text.split("\n")
    rows = [re.split(r"\s{2,}", line.strip()) for line in lines]
    count = max(map(len, rows), default=1)
    columns = [str(number) for number in range(count)]
    cells = [[*row, *[""] * (count - len(row))] for row in rows]
    return Grid(title, columns, cells, words=columns, show_header=False).html()
