"""Detection of journals that are missing together with their rows, by comparison with the stored row counts."""

from __future__ import annotations

from pathlib import Path

from .journal_truncation_check import NAME, read_counts
from .parts import JOURNALS, Part, names_in, part_files


def row_counts_in(folder: Path) -> dict[Path, int]:
    """Return the row count files of all processes, each with its rank."""
    names = {name: NAME.fullmatch(name) for name in names_in(folder / JOURNALS)}
    return {folder / JOURNALS / name: int(match[1]) for name, match in names.items() if match}


def rows_written(folder: Path) -> tuple[dict[tuple[str, Part], int], list[Path]]:
    """Return the minimum number of rows written to each journal, by table and part, and the damaged row count files."""
    counts: dict[tuple[str, Part], int] = {}
    damaged = []
    for path, rank in row_counts_in(folder).items():
        found = read_counts(path)
        if found is None:
            damaged.append(path)
        counts |= {(table, Part(rank, number)): rows for (table, number), rows in (found or {}).items()}
    return counts, damaged


def lost_journals(folder: Path, table: str) -> dict[Path, str]:
    """Return the missing journals of a table whose rows are in no part, each with a message."""

    def found() -> dict[Path, str]:
        written, _ = rows_written(folder)
        return {
            part.journal(folder, name): f"the file is missing, with {rows:,} rows"
            for (name, part), rows in written.items()
            if name == table
            and not part.journal(folder, name).exists()
            and not any(later.covers(part) for later in part_files(folder, name))
        }

    lost = found()
    # Checked twice: a run that resumes removes journals in between.
    return {path: problem for path, problem in found().items() if path in lost} if lost else {}
