"""What a run's journals should hold, by the counts beside them, and journals that are gone with their rows."""

from __future__ import annotations

from pathlib import Path

from .parts import JOURNALS, Part, names_in, parts_of
from .row_counts import NAME, counts_in


def row_counts_in(folder: Path) -> dict[Path, int]:
    """The files of all processes, each with the rank."""
    names = {name: NAME.fullmatch(name) for name in names_in(folder / JOURNALS)}
    return {folder / JOURNALS / name: int(match[1]) for name, match in names.items() if match}


def rows_written(folder: Path) -> tuple[dict[tuple[str, Part], int], list[Path]]:
    """How many rows were written to each journal, at least, by table and part; and files of counts that are damaged."""
    counts: dict[tuple[str, Part], int] = {}
    damaged = []
    for path, rank in row_counts_in(folder).items():
        found = counts_in(path)
        if found is None:
            damaged.append(path)
        counts |= {(table, Part(rank, number)): rows for (table, number), rows in (found or {}).items()}
    return counts, damaged


def lost_journals(folder: Path, table: str) -> dict[Path, str]:
    """Journals of a table that are gone though no part has their rows, each with what is lost."""

    def found() -> dict[Path, str]:
        written, _ = rows_written(folder)
        return {
            part.journal(folder, name): f"the file is gone, with {rows:,} rows"
            for (name, part), rows in written.items()
            if name == table
            and not part.journal(folder, name).exists()
            and not any(later.covers(part) for later in parts_of(folder, name))
        }

    lost = found()
    return (
        {path: told for path, told in found().items() if path in lost} if lost else {}
    )  # a run that is resumed takes them
