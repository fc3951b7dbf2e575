"""The tables of `glm5 ledger`: fitted to a terminal, aligned plain lines when piped. Read next: `ledger`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

_STYLES: dict[str, str] = {
    "exact": "green",
    "consistent": "cyan",
    "conflict": "bold red",
    "not computable": "yellow",
}


@dataclass(frozen=True)
class Block:
    """A table: its title, column names, which of them align right, and rows; a plain string is a section's name."""

    title: str
    columns: tuple[str, ...]
    right: tuple[str, ...]
    rows: list[tuple[str, ...] | str]


def without_empty_columns(block: Block) -> Block:
    """The same without columns in which nothing stands, as claims for a configuration that nobody wrote about."""
    cells = [row for row in block.rows if not isinstance(row, str)]
    kept = [i for i in range(len(block.columns)) if any(row[i] for row in cells)]
    rows = [row if isinstance(row, str) else tuple(row[i] for i in kept) for row in block.rows]
    return Block(block.title, tuple(block.columns[i] for i in kept), block.right, rows)


def print_blocks(blocks: list[Block]) -> None:
    """Each block as wide as its terminal lets it be, or plain."""
    if not sys.stdout.isatty():
        for block in blocks:
            _print_plain(block)
        return
    console = Console(highlight=False)
    for whole in blocks:
        block = whole if _width(whole) <= console.width else _stacked(whole)
        table = Table(box=SIMPLE_HEAD, title=block.title, title_style="bold", title_justify="left", pad_edge=False)
        for name in block.columns:
            right = name in block.right
            quiet = name in ("source", "formula", "why", "needs")
            table.add_column(
                name,
                justify="right" if right else "left",
                no_wrap=right or name in ("verdict", "size"),
                overflow="fold",
                style="dim" if quiet else "",
            )
        for row in block.rows:
            if isinstance(row, str):
                table.add_section()
                table.add_row(Text(row, style="bold"))
            else:
                table.add_row(*map(_styled, row))
        console.print(table)


def _widths(block: Block) -> list[int]:
    rows = [block.columns, *(r for r in block.rows if not isinstance(r, str))]
    return [max(len(row[i]) for row in rows) for i in range(len(block.columns))]


def _width(block: Block) -> int:
    """Columns of a terminal that the block needs, its last column wrapped to 40."""
    *widths, last = _widths(block)
    return sum(widths) + min(last, 40) + 3 * len(block.columns)


def _styled(cell: str) -> Text:
    """A verdict in its colour; what `_stacked` put below a label dimmed."""
    first, _, rest = cell.partition("\n")
    text = Text(first, style=_STYLES.get(first, ""))
    return text.append(f"\n{rest}", style="dim") if rest else text


def _stacked(block: Block) -> Block:
    """The same for a narrow terminal: the last column (and the source) below the first, to save their width."""
    last = len(block.columns) - 1
    below = [i for i, name in enumerate(block.columns) if i == last or name == "source"]
    kept = [i for i in range(last) if i not in below]

    def stack(row: tuple[str, ...]) -> tuple[str, ...]:
        label = "\n".join(filter(None, [row[0], *(row[i] for i in reversed(below))]))
        return (label if row[0] else f" \n{label}", *(row[i] for i in kept[1:]))

    rows = [row if isinstance(row, str) else stack(row) for row in block.rows]
    return Block(block.title, tuple(block.columns[i] for i in kept), block.right, rows)


def _print_plain(block: Block) -> None:
    widths = _widths(block)

    def aligned(cells: tuple[str, ...]) -> str:
        named = zip(cells, block.columns, widths, strict=True)
        return "  ".join(c.rjust(w) if name in block.right else c.ljust(w) for c, name, w in named).rstrip()

    print(f"{block.title}\n\n{aligned(block.columns)}")
    for row in block.rows:
        print(f"\n{row}" if isinstance(row, str) else aligned(row))
    print()


def print_lines(lines: list[str], style: str = "") -> None:
    """Lines after a table; `style` is for the last of them."""
    if not sys.stdout.isatty():
        print("\n".join(lines))
        return
    console = Console(highlight=False)
    for i, line in enumerate(lines):
        console.print(Text(line, style=style if i == len(lines) - 1 else ""))
