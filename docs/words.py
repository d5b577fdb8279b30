"""Refuses words in prose for which this project uses a standard term: `make check`.

Prose is the text of the Markdown files, and the strings and comments of the package, its configuration, the examples
and the benchmarks.
"""

from __future__ import annotations

import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[1]
PAGES = ("*.md", "docs/**/*.md", "examples/*.md", "benchmarks/*.md")
SOURCES = ("instrument/**/*.py", "conf/**/*.yaml", "examples/*.py", "examples/notebooks/*.ipynb", "benchmarks/**/*.py")
TERMS = {
    r"foret(?:ell|old)": "predict, estimate",
    r"is told|are told|told of|tells of": "report, raise, warn",
    r"anew": "again",
    r"bespeaks?|bespoken": "register",
    r"(?:of )?(?:one|nobody|the user)'s own": "custom, your",
    r"whoever|nobody": "name the subject",
    r"to the last bit|to the bit": "bit-identical",
    r"(?:is|are) at hand|to be had": "available",
    r"looks? away|looked away": "pause",
    r"fire drill": "test",
    r"mistakes?": "error, problem",
    r"beside": "next to, in addition to",
}
PATTERN = re.compile("|".join(rf"\b(?:{words})\b" for words in TERMS), re.IGNORECASE)


def prose(file: Path) -> Iterator[tuple[int, str]]:
    """Each line of prose of a file, with its number."""
    text = file.read_text()
    if file.suffix == ".md":
        blanked = re.sub(r"^```.*?^```$", lambda block: "\n" * block[0].count("\n"), text, flags=re.M | re.S)
        for number, line in enumerate(blanked.splitlines(), 1):
            yield number, re.sub(r"`[^`]*`", "", line)
        return
    if file.suffix == ".yaml":
        yield from ((number, line.partition("#")[2]) for number, line in enumerate(text.splitlines(), 1))
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if tokenize.tok_name[token.type] in ("COMMENT", "STRING", "FSTRING_MIDDLE"):
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, line


def main() -> int:
    """Print each word that was found, with its location and the standard term; returns the exit code."""
    files = [file for pattern in PAGES for file in sorted(REPOSITORY.glob(pattern))]
    found = 0
    files += [file for pattern in SOURCES for file in sorted(REPOSITORY.glob(pattern))]
    for file in files:
        for number, line in prose(file):
            for match in PATTERN.finditer(line):
                term = next(term for words, term in TERMS.items() if re.fullmatch(words, match[0], re.IGNORECASE))
                print(f"{file.relative_to(REPOSITORY)}:{number}: {match[0]!r}: write {term}")
                found += 1
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
