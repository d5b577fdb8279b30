"""Display of a plan: the module tree with hooks, the cost of each spec, and explanations for unmatched modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..formatting import human_bytes, human_seconds
from ..spec.description import describe_action
from ..spec.globs import matches
from ..spec.hooks import HookSpec
from ..spec.record import RecordSpec
from .cost import Forecast
from .layer_selection import some
from .modules import Layer
from .remarks import remarks
from .shape_inference import Trial
from .sites import HookPlan
from .tree import acting_order, module_tree

ENDLESS = 10_000  # columns: wide enough for any table
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def plan_view(
    plan: HookPlan, trials: Mapping[str, Trial], forecast: Forecast, steps: int, folder: Path | None = None
) -> RenderableType:
    """Render the complete plan with rich.

    Args:
        plan: The plan.
        trials: The results of shape inference, by phase.
        forecast: The estimated cost.
        steps: The number of steps of the run.
        folder: The folder in which a run would be created.

    Returns:
        A rich renderable.
    """
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(plan.specs)}
    parts: list[RenderableType] = [
        module_tree(plan, colours),
        Text(),
        Costs(plan, forecast, steps, colours),
        Text(
            f"a step takes {human_seconds(forecast.bare)} here, and with these hooks {human_seconds(forecast.hooked)} on "
            f"average: {forecast.slowdown:.1%} more",
            style="dim",
        ),
        Text(),
        *written(plan, colours, folder),
    ]
    if any(len(names) > 1 for layer in plan.layers for names in acting_order(plan, layer)):
        parts.insert(1, Text("a → b: at the same tensor, b sees what a returned", style="dim"))
    notes = list(plan_notes(plan, trials))
    if notes:
        parts += [
            Text(),
            Text("Not matched, or not to be seen:", style="bold"),
            *(Padding(Text(note), (0, 0, 0, 2)) for note in notes),
        ]
    return Group(*parts)


@dataclass(frozen=True)
class Costs:
    """A table with one row per spec: action, sites, schedule, rows, bytes and overhead.

    It adapts to the available width.
    """

    plan: HookPlan
    forecast: Forecast
    steps: int
    colours: Mapping[str, str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = self._table(narrow=False)
        fits = Measurement.get(console, options.update_width(ENDLESS), wide).maximum <= options.max_width
        yield wide if fits else self._table(narrow=True)

    def _table(self, *, narrow: bool) -> Table:
        """Build the table. The narrow one combines kind and action and omits rows per step."""
        title = f"{len(self.plan.specs)} hooks in {self.steps} steps"
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        kind, rows_a_step = ((), ()) if narrow else (("kind",), ("rows/step",))
        for name in ("hook", *kind, "action", "at", "when", *rows_a_step, "rows", "bytes", "time"):
            words = name in ("hook", "kind", "action", "when")
            folded = narrow and name in ("action", "when")
            table.add_column(name, justify="left" if words else "right", no_wrap=not folded, overflow="fold")
        for name, spec in self.plan.specs.items():
            table.add_row(*self._cells(name, spec, narrow=narrow))
        if self.plan.specs:
            table.add_section()
            table.add_row(*self._total(narrow=narrow))
        return table

    def _cells(self, name: str, spec: HookSpec, *, narrow: bool) -> list[str]:
        spent = self.forecast.cost[name]
        when = escape(str(spec.schedule)) if spent.firings else f"[red]never[/]: {escape(str(spec.schedule))}"
        action = escape(describe_action(spec))
        return [
            f"[{self.colours[name]}]{name}[/]",
            *([f"{spec.kind}: {action}"] if narrow else [spec.kind, action]),
            str(len(self.plan.of(name))),
            when,
            *([] if narrow else [f"{spent.rows_per_step:,}"]),
            f"{spent.rows:,}",
            human_bytes(spent.bytes),
            "" if spec.phase == "eval" else f"+{self.forecast.share(name, self.steps):.1%}",
        ]

    def _total(self, *, narrow: bool) -> list[str]:
        cost = self.forecast.cost.values()
        return [
            "[bold]in all[/]",
            *([""] if narrow else ["", ""]),
            str(len(self.plan.sites)),
            "",
            *([] if narrow else [f"{sum(spent.rows_per_step for spent in cost):,}"]),
            f"[bold]{sum(spent.rows for spent in cost):,}[/]",
            f"[bold]{human_bytes(sum(spent.bytes for spent in cost))}[/]",
            f"[bold]{self.forecast.slowdown:+.1%}[/]",
        ]


def written(plan: HookPlan, colours: Mapping[str, str], folder: Path | None) -> Iterator[Text]:
    """Yield lines about the tables that the run will write, and the hooks that write to each."""
    into: dict[str, list[str]] = {"stats": [], "distributions": [], "tensors": [], "effects": []}
    for name, spec in plan.specs.items():
        for table in _tables_of(spec):
            into[table].append(name)
    yield Text("Will be written" + ("" if folder is None else f" to a folder like {folder}"), "bold")
    width = max((len(table) for table, names in into.items() if names), default=0) + 1
    for table, names in into.items():
        if names:
            hooks = Text(", ").join(Text(name, colours[name]) for name in names)
            yield Text.assemble(f"  {table + '/':<{width}}  ", hooks)
    yield Text("  metrics/, coverage/, layers/, events/ and run.json in any case", "dim")


def _tables_of(spec: HookSpec) -> list[str]:
    if not isinstance(spec, RecordSpec):
        return ["effects"]
    asked = {
        "stats": spec.statistics,
        "distributions": spec.quantiles or spec.histogram,
        "tensors": spec.tensors,
    }
    return [table for table, is_asked in asked.items() if is_asked]


def plan_notes(plan: HookPlan, trials: Mapping[str, Trial]) -> Iterator[str]:
    """Yield explanations for modules that a user may expect to match, but that do not match or cannot be recorded."""
    for name, spec in plan.specs.items():
        sites = plan.of(name)
        matched = {id(site.layer) for site in sites}
        for site in sites:
            if site.note:
                yield f"{name}: {site.label}: {site.note}"
        unseen = [layer for layer in plan.layers if id(layer) not in matched]
        for pattern in spec.globs:
            if "*" in pattern and not pattern.startswith("re:") and not pattern.endswith("**"):
                below = [
                    layer.label for layer in unseen if matches(f"{pattern}.**" if pattern != "." else "**", layer.name)
                ]
                if below:
                    yield f"{name}: '{pattern}' stops where '{pattern}.**' would go on: {some(below, 4)}"
        named = [
            layer for layer in unseen if any(matches(pattern, alias) for pattern in spec.globs for alias in layer.names)
        ]
        seen = {id(site.parameter) for site in sites}
        for label, found in _dropped(spec, named, seen):
            yield f"{name}: {label}: {some([layer.label for layer in found], 4)}"
        if spec.definition.family == "module":
            silent = [site.label for site in sites if id(site.layer.module) not in trials[spec.phase]]
            if silent:
                yield f"{name}: not called in a trial forward pass: {some(silent, 4)}"
    yield from (remark.message for remark in remarks(plan))


def _dropped(spec: HookSpec, named: list[Layer], seen: set[int]) -> Iterator[tuple[str, list[Layer]]]:
    """Yield the layers that the globs match but another field excludes, by the reason."""
    typed = [layer for layer in named if spec.types and not any(layer.is_a(name) for name in spec.types)]
    excluded = [
        layer for layer in named if any(matches(pattern, name) for pattern in spec.exclude for name in layer.names)
    ]
    rest = [layer for layer in named if layer not in typed and layer not in excluded]
    of_parameters = spec.definition.family != "module"
    bare = [layer for layer in rest if of_parameters and _has_some_below_alone(spec, layer, seen)]
    if typed:
        yield f"not of type {' or '.join(spec.types)}", typed
    if excluded:
        yield "taken away by exclude", excluded
    if bare:
        yield "no parameter of its own", bare
    holders = [layer for layer in rest if layer.is_holder and not of_parameters]
    if holders:
        yield "only holds others, and is never called", holders


def _has_some_below_alone(spec: HookSpec, layer: Layer, seen: set[int]) -> bool:
    """Return whether a layer has no parameters itself, but submodules with parameters that the spec would select."""
    if any(True for _ in layer.own_parameters()):
        return False
    missed = [name.rpartition(".")[2] for name, p in layer.module.named_parameters() if id(p) not in seen]
    return any(not spec.params or any(matches(pattern, own) for pattern in spec.params) for own in missed)
