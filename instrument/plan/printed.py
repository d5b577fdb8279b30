"""The plan, as it is shown: the modules and what is done at each, what each spec costs, and what is not matched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..spec.globs import matches
from ..spec.hooks import HookSpec
from ..spec.record import RecordSpec
from .cost import Forecast
from .modules import Layer
from .remarks import remarks
from .select import some
from .sites import HookPlan
from .trial import Trial

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def plan_view(plan: HookPlan, trials: Mapping[str, Trial], forecast: Forecast, steps: int) -> RenderableType:
    """The whole plan, to be printed by rich."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(plan.specs)}
    parts: list[RenderableType] = [
        module_tree(plan, colours),
        Text(),
        cost_table(plan, forecast, steps, colours),
        Text(
            f"a step takes {human_seconds(forecast.bare)} here, and with these hooks {human_seconds(forecast.hooked)} on "
            f"average: {forecast.slowdown:.1%} more",
            style="dim",
        ),
    ]
    if any(len(names) > 1 for layer in plan.layers for names in acting_order(plan, layer)):
        parts.insert(1, Text("a → b: at the same tensor, b sees what a returned", style="dim"))
    notes = list(plan_notes(plan, trials))
    if notes:
        parts += [Text(), Text("Not matched, or not to be seen:", style="bold"), *(Text(f"  {note}") for note in notes)]
    return Group(*parts)


def module_tree(plan: HookPlan, colours: Mapping[str, str]) -> Tree:
    """Every module with its type, its own parameters and the specs that match it, in the order in which they act."""
    nodes: dict[str, Tree] = {}
    for layer in plan.layers:
        label = _module_label(plan, layer, colours)
        parent = layer.name.rpartition(".")[0]
        if not layer.name:
            nodes[""] = Tree(label)
        else:
            nodes[layer.name] = nodes[parent if parent in nodes else ""].add(label)
    return nodes[""]


def _module_label(plan: HookPlan, layer: Layer, colours: Mapping[str, str]) -> Text:
    hooks = acting_order(plan, layer)
    own = layer.name.rpartition(".")[2] or "."
    label = Text.assemble((own, "" if hooks else "dim"), " ", (layer.type, "dim"))
    count = sum(parameter.numel() for _, parameter in layer.own_parameters())
    if count:
        label.append(f"  {count:,} parameters", "dim")
    if layer.aliases:
        label.append(f"  also {', '.join(layer.aliases)}", "dim")
    for i, names in enumerate(hooks):
        for j, hook in enumerate(names):
            label.append(" → " if j else ", " if i else "  ")
            label.append(hook, colours[hook])
    return label


def acting_order(plan: HookPlan, layer: Layer) -> list[list[str]]:
    """The specs at a layer; those that share a kind and a role act one after the other, in the order written."""
    places: dict[tuple[str, str], list[str]] = {}
    for site in plan.at(layer):
        names = places.setdefault((site.spec.kind, site.spec.tensor_role), [])
        if site.spec.name not in names:
            names.append(site.spec.name)
    return list(places.values())


def cost_table(plan: HookPlan, forecast: Forecast, steps: int, colours: Mapping[str, str]) -> Table:
    """A row a spec: what it does, where, when, what it writes, and by how much it makes steps longer."""
    cost = forecast.cost
    table = Table(
        title=f"{len(plan.specs)} hooks in {steps} steps",
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
    )
    for name, justify in (
        ("hook", "left"),
        ("kind", "left"),
        ("action", "left"),
        ("at", "right"),
        ("when", "left"),
        ("rows/step", "right"),
        ("rows", "right"),
        ("bytes", "right"),
        ("time", "right"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name, spec in plan.specs.items():
        spent = cost[name]
        when = escape(str(spec.schedule)) if spent.firings else f"[red]never[/]: {escape(str(spec.schedule))}"
        cells = (spec.kind, describe_action(spec), str(len(plan.of(name))), when)
        table.add_row(
            f"[{colours[name]}]{name}[/]",
            *cells,
            f"{spent.rows_per_step:,}",
            f"{spent.rows:,}",
            human_bytes(spent.bytes),
            "" if spec.phase == "eval" else f"+{forecast.share(name, steps):.1%}",
        )
    if cost:
        table.add_section()
        rows, size = sum(c.rows for c in cost.values()), sum(c.bytes for c in cost.values())
        per_step = sum(c.rows_per_step for c in cost.values())
        table.add_row(
            "[bold]in all[/]",
            "",
            "",
            str(len(plan.sites)),
            "",
            f"{per_step:,}",
            f"[bold]{rows:,}[/]",
            f"[bold]{human_bytes(size)}[/]",
            f"[bold]{forecast.slowdown:+.1%}[/]",
        )
    return table


def describe_action(spec: HookSpec) -> str:
    """`record stats, tensors`, `clip norm 1.0`, `modify noise`: what a spec does, in a few words."""
    if isinstance(spec, RecordSpec):
        return "record " + ", ".join(
            part
            for part, asked in (
                ("stats", spec.statistics),
                ("quantiles", spec.quantiles),
                ("histogram", spec.histogram),
                ("tensors", spec.tensors),
            )
            if asked
        )
    told = spec.model_dump(
        include={"min", "max", "value", "norm", "factor", "fn", "std", "coefficient"},
        exclude_none=True,
        exclude_unset=True,
        by_alias=True,
    )
    fn = told.pop("fn", None)
    parts = [
        spec.action,
        fn["_target_"] if isinstance(fn, dict) else fn,
        *(f"{key} {value:g}" if isinstance(value, int | float) else f"{key} {value}" for key, value in told.items()),
    ]
    return " ".join(part for part in parts if part)


def plan_notes(plan: HookPlan, trials: Mapping[str, Trial]) -> Iterator[str]:
    """Why something that a user may expect is not matched, or cannot be seen."""
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
    """The layers that the globs match and something else takes away, by what does."""
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
    """Whether a layer without parameters of its own stands above some that the spec would have meant."""
    if any(True for _ in layer.own_parameters()):
        return False
    missed = [name.rpartition(".")[2] for name, p in layer.module.named_parameters() if id(p) not in seen]
    return any(not spec.params or any(matches(pattern, own) for pattern in spec.params) for own in missed)


def human_bytes(count: float) -> str:
    """`1.2 MB`: powers of 1000, three digits."""
    units = ["B", "kB", "MB", "GB", "TB"]
    while count >= 999.5 and len(units) > 1:
        count /= 1000
        units.pop(0)
    return f"{count:.3g} {units[0]}" if count < 999.5 else f"{count:,.0f} {units[0]}"


def human_seconds(seconds: float) -> str:
    """`25.3 ms`: three digits."""
    return f"{seconds:.3g} s" if seconds >= 0.9995 else f"{seconds * 1e3:.3g} ms"
