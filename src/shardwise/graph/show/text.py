"""Text with colours, as wide as the terminal: a page is a list of lines, and of tables between them."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterable, Iterator, Sequence

from shardwise.debug.table import Table, draw
from shardwise.graph.show.lines import OpLine, Styled
from shardwise.graph.show.repeats import Repeat

Text = list[Styled]
Page = list[Text | Table]

_COLOURS = {"op": "bold", "collective": "bold yellow", "type": "cyan", "place": "dim", "head": "bold underline"}

LABEL = 10
"""The width of the column of labels."""


def plain(text: str, style: str = "") -> Text:
    return [(text, style)]


def labelled(label: str, said: str, width: int) -> Iterator[Text]:
    """A label, and what is said of it."""
    for line in broken(said, width - LABEL):
        yield [(f"{label:<{LABEL}}", "place"), (line, "")]
        label = ""


def broken(said: str, width: int) -> Iterator[str]:
    """Lines of so many characters, broken between words.

    >>> list(broken("more than one line", 10))
    ['more than', 'one line']
    """
    line = ""
    for word in said.split(" "):
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def drawn(page: Sequence[Text | Table], width: int, *, color: bool) -> str:
    """A page as one string. Without Rich, and where nothing is to be coloured, it is plain text."""
    if not color or importlib.util.find_spec("rich") is None:
        return "".join(_plain(part, width) for part in page)
    return _coloured(page, width)


def _plain(part: Text | Table, width: int) -> str:
    return draw([part], width) if isinstance(part, Table) else "".join(text for text, _ in part).rstrip() + "\n"


def _coloured(page: Sequence[Text | Table], width: int) -> str:
    from rich.console import Console
    from rich.text import Text as RichText

    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, highlight=False)
    for part in page:
        if isinstance(part, Table):
            out.write(draw([part], width, color=True))
        else:
            console.print(RichText.assemble(*((text, _COLOURS.get(style, "")) for text, style in part)), soft_wrap=True)
    return out.getvalue()


# Ops


def laid_out(lines: Iterable[OpLine | Repeat], width: int, margin: str = "") -> Iterator[Text]:
    """Ops as lines of a page; a repeated block stands in a bracket."""
    for line in lines:
        if isinstance(line, Repeat):
            yield plain(f"{margin}┌ {line.count} ×, of which this is the first", "place")
            yield from laid_out(line.body, width, f"{margin}│ ")
            yield plain(f"{margin}└ to %{line.last}", "place")
        else:
            yield from _op(line, width, margin)


def _op(line: OpLine, width: int, margin: str) -> Iterator[Text]:
    """An op, on as many lines as it needs: broken behind commas, and before its result."""
    head = f"{margin}{f'%{line.number}':>5}  "
    now: Text = [(margin, "place"), (head[len(margin) :], "value")]
    left = width - len(head)
    indent = margin + " " * (len(head) - len(margin) + 4)
    for piece in _pieces(line):
        length = sum(len(text) for text, _ in piece)
        if length > left and len(now) > 2:
            yield now
            now, left = [(margin, "place"), (indent[len(margin) :], "")], width - len(indent)
            piece = [(piece[0][0].lstrip(), piece[0][1]), *piece[1:]]
            length = sum(len(text) for text, _ in piece)
        now += piece
        left -= length
    yield now


def _pieces(line: OpLine) -> Iterator[Text]:
    """The parts of a line that stay together: operands, and at its end the result and the user's line."""
    piece: Text = []
    for text, style in line.said:
        if text == " -> ":
            yield piece
            piece = []
        piece.append((text, style))
        if text == ", ":
            yield piece
            piece = []
    yield [*piece, *([(f"  # {line.place}", "place")] if line.place else [])]
