"""Makes what the docs take from the code: tables between markers in the Markdown files, and the JSON Schema.

Run by `make docs`; a test holds the files against it.
"""

from __future__ import annotations

import re
from pathlib import Path

from instrument.capture.tables import markdown
from instrument.spec import schema
from instrument.spec.base import HookBase
from instrument.spec.functions import FUNCTIONS, FunctionSpec
from instrument.spec.interventions import ClipSpec, ScaleSpec
from instrument.spec.kinds import KINDS
from instrument.spec.record import RecordSpec
from instrument.spec.statistics import STATISTICS

REPOSITORY = Path(__file__).parents[1]


def kinds() -> str:
    """The table of kinds."""
    rows = [f"| `{kind.name}` | {', '.join(kind.roles)} | {kind.meaning} |" for kind in KINDS.values()]
    return "\n".join(["| kind | roles (the first is the default) | an intervention changes |", "|---|---|---|", *rows])


def actions() -> str:
    """The table of actions and their fields."""
    functions: dict[type[HookBase], list[str]] = {}
    for name, spec in FUNCTIONS.items():
        functions.setdefault(spec, []).append(name)
    rows: list[tuple[str, type[HookBase]]] = [
        ("record", RecordSpec),
        ("clip", ClipSpec),
        ("scale", ScaleSpec),
        *((f"modify, fn: {' or '.join(names)}", spec) for spec, names in functions.items()),
        ("modify, fn: {_target_: ...}", FunctionSpec),
    ]
    lines = [f"| `{name}` | {_fields(spec)} | {_sentence(spec)} |" for name, spec in rows]
    return "\n".join(["| action | fields | |", "|---|---|---|", *lines])


def _fields(spec: type[HookBase]) -> str:
    own = [name for name in spec.model_fields if name not in HookBase.model_fields and name not in ("action", "fn")]
    return ", ".join(f"`{name}`" for name in own)


def _sentence(spec: type[HookBase]) -> str:
    return (spec.__doc__ or "").strip().splitlines()[0]


def statistics() -> str:
    """The table of statistics."""
    rows = [
        f"| `{s.name}` | {s.formula.replace('|', chr(92) + '|')} | {s.unit} | {'yes' if s.default else 'all'} |"
        for s in STATISTICS.values()
    ]
    return "\n".join(
        [
            "| statistic | formula, x being the n finite values | unit | in `stats: default` |",
            "|---|---|---|---|",
            *rows,
        ]
    )


GENERATED = {
    "README.md": {"kinds": kinds, "actions": actions, "statistics": statistics},
    "docs/tables.md": {"tables": markdown},
}


def rendered(name: str) -> str:
    """A Markdown file with what stands between its markers made anew."""
    text = (REPOSITORY / name).read_text()
    for marker, make in GENERATED[name].items():
        begin, end = f"<!-- {marker}: made by make docs -->", f"<!-- /{marker} -->"
        text = re.sub(
            f"{re.escape(begin)}.*?{re.escape(end)}",
            lambda _, b=begin, e=end, m=make: f"{b}\n{m().strip()}\n{e}",
            text,
            flags=re.S,
        )  # type: ignore[misc]
    return text


def main() -> None:
    """Write every file anew."""
    for name in GENERATED:
        (REPOSITORY / name).write_text(rendered(name))
    (REPOSITORY / "conf" / "schema.json").write_text(schema.render())


if __name__ == "__main__":
    main()
