"""Display of a plan: the module tree with hooks, the cost of each spec, and explanations for unmatched modules.

The tree has the hooks at each module, and the functions that it calls. Identical blocks are shown once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from ..config.base import InterventionSpec
from ..config.hook_specs import HookSpec, RecordSpec, describe_action
from ..config.parallel import ParallelConfig
from ..config.schedule import STEP_PHASES
from ..fields.globs import matches
from ..formatting import human_bytes, human_seconds, shorten
from ..tables.kinds import ATTENTION_ROLES
from ..tables.schemas import TABLES
from .cost import Forecast, mesh_cost
from .function_calls import selects
from .hook_plan import HookPlan, Site, is_selected, remarks
from .modules import Layer
from .shape_inference import FunctionInfo, InferredCalls, calls_of, function_calls_of

COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
MAX_FUNCTIONS = 30  # shown for each module
MIN_LINES_SAVED = 2  # the minimum number of lines saved for which identical blocks are combined


def plan_view(
    plan: HookPlan,
    inferred_by_phase: Mapping[str, InferredCalls],
    forecast: Forecast,
    steps: int,
    folder: Path | None = None,
) -> RenderableType:
    """Render the complete plan with rich. `folder`: the one in which a run would be created."""
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(plan.specs)}
    data = plan_data(plan, inferred_by_phase, forecast, steps)
    called = [name for name, spec in plan.specs.items() if spec.action == "call"]
    uncalled = "without the functions of action call, which a plan does not call"
    parts: list[RenderableType] = [
        module_tree(plan, next(iter(inferred_by_phase.values()), {}), colours),
        Text(),
        _costs(data, forecast, colours),
        Text(
            f"mean time per step on this machine: {human_seconds(forecast.baseline_seconds)} without hooks, "
            f"{human_seconds(forecast.hooked_seconds)} with hooks ({forecast.slowdown:+.1%})",
            style="dim",
        ),
        *_kept_tensors(plan, forecast),
        *([Text(f"{uncalled}: {', '.join(called)}", style="dim")] if called else []),
        Text(),
        *output_tables(plan, colours, folder),
    ]
    if any(len(names) > 1 for layer in plan.layers for names in execution_order(plan, layer)):
        parts.insert(1, Text("a → b: both hooks act on the same tensor, a first", style="dim"))
    if data["notes"]:
        notes = (Padding(Text(note), (0, 0, 0, 2)) for note in data["notes"])
        parts += [Text(), Text("Not matched or not recorded:", style="bold"), *notes]
    return Group(*parts)


def plan_data(
    plan: HookPlan, inferred_by_phase: Mapping[str, InferredCalls], forecast: Forecast, steps: int
) -> dict[str, Any]:
    """Return the plan as plain values: one entry for each spec with its places and cost, the totals, and the notes.

    The time of a spec is a fraction of that of a step without hooks; null outside of steps.
    """
    hooks = [
        {
            "name": name,
            "kind": spec.kind,
            "action": describe_action(spec),
            "at": [site.label for site in plan.of(name)],
            "when": f"{spec.schedule}{_condition(spec)}",
            "rows": forecast.cost[name].rows,
            "bytes": forecast.cost[name].bytes,
            "time": forecast.share(name, steps) if spec.phase in STEP_PHASES else None,
            "tables": _tables_of(spec),
        }
        for name, spec in plan.specs.items()
    ]
    costs = forecast.cost.values()
    return {
        "steps": steps,
        "hooks": hooks,
        "rows": sum(each.rows for each in costs),
        "bytes": sum(each.bytes for each in costs),
        "time": forecast.slowdown,
        "seconds_per_step": {"without_hooks": forecast.baseline_seconds, "with_hooks": forecast.hooked_seconds},
        "notes": [*plan_notes(plan, inferred_by_phase)],
    }


def mesh_view(plan: HookPlan, forecast: Forecast, parallel: ParallelConfig, *, reduces: bool, on_gpu: bool) -> Text:
    """Return a line about the output of all processes of `train.parallel`."""
    shards = parallel.data == "fsdp2"
    cost = mesh_cost(forecast, plan.specs, parallel.sizes, shards=shards, reduces=reduces, on_gpu=on_gpu)
    number = "each process" if parallel.size is None else f"{parallel.size} process{'es' * (parallel.size != 1)}"
    text = f"on {number} ({parallel.label}): {cost.rows:,} rows, at most {human_bytes(cost.bytes)}, {cost.collectives or 'no'}"
    text += " collective operations for rows in each step with scheduled hooks"
    changed = [spec.definition.family for spec in plan.specs.values() if isinstance(spec, InterventionSpec)]
    if changed and ("tp" in parallel.sizes or (shards and {*changed} & {"parameter", "optimizer"})):
        text += ", and others for each shard that hooks change"
    return Text(text)


def _kept_tensors(plan: HookPlan, forecast: Forecast) -> Iterator[Text]:
    for name, spec in plan.specs.items():
        if isinstance(spec, RecordSpec) and spec.keep is not None:
            memory = human_bytes(forecast.cost[name].memory)
            rule = f"rule {spec.when}" if spec.when else "a rule non_finite"
            steps = "the last step" if spec.keep == 1 else f"the last {spec.keep} recorded steps"
            yield Text(
                f"{name}: tensors of {steps} in memory, {memory}; written if {rule} fires or the run fails", style="dim"
            )


def _costs(data: Mapping[str, Any], forecast: Forecast, colours: Mapping[str, str]) -> Table:
    counts = ((len(data["hooks"]), "hook"), (data["steps"], "step"))
    title = " in ".join(f"{count} {noun}{'' if count == 1 else 's'}" for count, noun in counts)
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in ("hook", "action", "at", "when", "rows", "bytes", "time"):
        folds = name in ("action", "when")
        table.add_column(
            name, justify="left" if folds or name == "hook" else "right", no_wrap=not folds, overflow="fold"
        )
    for hook in data["hooks"]:
        name, action = f"[{colours[hook['name']]}]{hook['name']}[/]", f"{hook['kind']}: {escape(hook['action'])}"
        never = "" if forecast.cost[hook["name"]].firings else "[red]never[/]: "
        table.add_row(name, action, str(len(hook["at"])), never + escape(hook["when"]), *_cost_cells(hook))
    if data["hooks"]:
        count = sum(len(hook["at"]) for hook in data["hooks"])
        fixed = data["time"] - sum(hook["time"] or 0.0 for hook in data["hooks"])
        if fixed >= 0.0005:
            table.add_row("", "rules and metrics of each step", *[""] * 4, f"{fixed:+.1%}")
        table.add_section()
        table.add_row("[bold]total[/]", "", str(count), "", *(f"[bold]{cell}[/]" for cell in _cost_cells(data)))
    return table


def _cost_cells(entry: Mapping[str, Any]) -> tuple[str, str, str]:
    time = "" if entry["time"] is None else f"{entry['time']:+.1%}"
    return f"{entry['rows']:,}", human_bytes(entry["bytes"]), time


def _condition(spec: HookSpec) -> str:
    if spec.condition is not None:
        return f", where {spec.condition}"
    return "" if spec.follows is None else f", after rule {spec.follows}"


def output_tables(plan: HookPlan, colours: Mapping[str, str], folder: Path | None) -> Iterator[Text]:
    """Yield lines about the tables that the run will write, and the hooks that write to each."""
    written = {name: _tables_of(spec) for name, spec in plan.specs.items()}
    hooks_by_table = {table: [name for name, tables in written.items() if table in tables] for table in TABLES}
    yield Text("Output tables" + ("" if folder is None else f" in a folder such as {folder}"), "bold")
    width = max((len(table) for table, names in hooks_by_table.items() if names), default=0) + 1
    for table, names in hooks_by_table.items():
        if names:
            hooks = Text(", ").join(Text(name, colours[name]) for name in names)
            yield Text.assemble(f"  {table + '/':<{width}}  ", hooks)
    yield Text("  metrics/, coverage/, layers/, events/ and run.json are always written", "dim")


def _tables_of(spec: HookSpec) -> list[str]:
    if isinstance(spec, InterventionSpec):
        return ["effects"]
    if not isinstance(spec, RecordSpec):
        return []
    given = {"stats": spec.statistics, "tensors": spec.tensors, "collectives": spec.kind == "collective"}
    return [*(table for table, is_given in given.items() if is_given), *spec.tables]


def plan_notes(plan: HookPlan, inferred_by_phase: Mapping[str, InferredCalls]) -> Iterator[str]:
    """Yield explanations for modules that a user may expect to match, but that do not match or cannot be recorded."""
    for name, spec in plan.specs.items():
        if spec.definition.family == "collective":
            continue  # it is at no module
        sites = plan.of(name)
        matched = {id(site.layer) for site in sites}
        for site in sites:
            if site.note:
                yield f"{name}: {site.label}: {site.note}"
        for table in spec.tables if isinstance(spec, RecordSpec) else ():
            least = TABLES[table].least_dimensions
            if small := [site.label for site in sites if site.parameter is not None and site.parameter.dim() < least]:
                yield f"{name}: no rows in {table}/ for tensors with fewer than {least} dimensions: {shorten(small, 4)}"
        unmatched = [layer for layer in plan.layers if id(layer) not in matched]
        for pattern in spec.globs:
            if "*" in pattern and not pattern.startswith("re:") and not pattern.endswith("**"):
                inside = f"{pattern}.**" if pattern != "." else "**"
                submodules = [layer.label for layer in unmatched if matches(inside, layer.name)]
                if submodules:
                    yield f"{name}: '{pattern}' does not match submodules; '{pattern}.**' would also match {shorten(submodules, 4)}"
        matched_by_glob = [layer for layer in unmatched if not spec.structure and layer.is_named(spec.globs)]
        of_sites = {id(site.parameter) for site in sites}
        unhooked = {key: names for key, names in plan.layers.parameter_names.items() if key not in of_sites}
        reasons = {layer.label: _why_unselected(spec, layer, unhooked) for layer in matched_by_glob}
        for reason in dict.fromkeys(filter(None, reasons.values())):
            yield f"{name}: {reason}: {shorten([label for label, each in reasons.items() if each == reason], 4)}"
        if spec.definition.family == "module":
            uncalled = [site.label for site in sites if id(site.layer.module) not in inferred_by_phase[spec.phase]]
            if uncalled:
                yield f"{name}: not called during shape inference: {shorten(uncalled, 4)}"
    yield from (remark.message for remark in remarks(plan))


def _why_unselected(spec: HookSpec, layer: Layer, unhooked: Mapping[int, Iterable[str]]) -> str | None:
    """Return why a spec does not select a layer that its globs match; None if this needs no explanation."""
    if spec.types and not any(map(layer.is_a, spec.types)):
        return f"not of type {' or '.join(spec.types)}"
    if layer.is_named(spec.exclude):
        return "excluded by 'exclude'"
    if spec.definition.family == "module":
        return "a container, which is never called" if layer.is_container else None
    below = [unhooked[id(parameter)] for parameter in layer.module.parameters() if id(parameter) in unhooked]
    has_own = any(True for _ in layer.own_parameters())
    is_above = not has_own and any(is_selected(spec, names) for names in below)
    return "contains no parameters directly" if is_above else None


@dataclass
class _Node:
    """A module in the tree: its line without its name, the functions that it calls, and its children."""

    layer: Layer
    line: Text
    functions: list[Text]
    is_hooked: bool
    children: list[_Node] = field(default_factory=list)

    @property
    def own_name(self) -> str:
        return self.layer.name.rpartition(".")[2] or "."

    @property
    def label(self) -> Text:
        return Text.assemble((self.own_name, "" if self.is_hooked else "dim"), self.line)

    @cached_property
    def content(self) -> tuple[object, ...]:
        """What is shown of it except its name. It is equal for identical blocks."""
        children = tuple((node.own_name, node.content) for node in self.children)
        return self.line.plain, tuple(text.plain for text in self.functions), children

    @cached_property
    def size(self) -> int:
        return 1 + len(self.functions) + sum(node.size for node in self.children)


def module_tree(plan: HookPlan, inferred: InferredCalls, colours: Mapping[str, str]) -> Tree:
    """Build a tree of all modules: types, numbers of parameters, shapes of outputs, and specs in execution order."""
    nodes: dict[str, _Node] = {}
    for layer in plan.layers:
        sites = plan.at(layer)
        functions = list(_functions([site for site in sites if site.spec.definition.of_functions], inferred, colours))
        node = nodes[layer.name] = _Node(layer, _line(plan, layer, inferred, colours), functions, bool(sites))
        if layer.name:
            parent = layer.name.rpartition(".")[0]
            nodes[parent if parent in nodes else ""].children.append(node)
    tree = Tree(nodes[""].label)
    _add_children(tree, nodes[""])
    return tree


def _functions(sites: Sequence[Site], inferred: InferredCalls, colours: Mapping[str, str]) -> Iterator[Text]:
    """Yield lines with the functions that a module calls, in the order of execution, with the shapes of their results.

    For the roles of attention, these are the functions that compute it, with the shapes of the weights.
    """
    groups: dict[tuple[str, ...], tuple[list[FunctionInfo], list[Site]]] = {}
    for site in sites:
        listed = "output" if site.spec.tensor_role not in ATTENTION_ROLES else site.spec.tensor_role
        functions = [each for each in next(iter(function_calls_of(site, inferred)), []) if each.tensors(listed)]
        if functions:
            groups.setdefault(tuple(map(_describe, functions)), (functions, []))[1].append(site)
    for functions, group in groups.values():
        names = [(site.spec.name, colours[site.spec.name]) for site in group]
        line = Text(", ", "dim").join(Text(*name) for name in names).append(": ", "dim")
        for i, function in enumerate(functions[:MAX_FUNCTIONS]):
            selecting = (site.spec for site in group if selects(site.spec, function.path.partition(".")[0]))
            spec = next(selecting, None)
            line.append(", " if i else "", "dim")
            line.append(_describe(function), "dim" if spec is None else colours[spec.name])
        if len(functions) > MAX_FUNCTIONS:
            line.append(f", ... ({len(functions)} in all)", "dim")
        yield line


def _describe(function: FunctionInfo) -> str:
    shapes = dict.fromkeys(str(list(info.shape)) for info in function.attention or function.outputs)
    return f"{function.path} {shorten([*shapes], 3)}"


def _add_children(tree: Tree, node: _Node) -> None:
    for line in node.functions:
        tree.add(line)
    for first, others in _group_identical(node.children):
        _add_children(tree.add(first.label), first)
        if others:
            names = f"{others[0].own_name} ... {others[-1].own_name}" if len(others) > 1 else others[0].own_name
            tree.add(Text.assemble(names, (f" {first.layer.type}  like {first.own_name}", "dim")))


def _group_identical(nodes: Sequence[_Node]) -> Iterator[tuple[_Node, list[_Node]]]:
    """Group adjacent identical nodes if that saves enough lines. Yield the first of each group and the others."""
    for _, group in groupby(nodes, key=lambda node: node.content):
        first, *others = group
        if sum(node.size for node in others) - 1 >= MIN_LINES_SAVED:
            yield first, others
        else:
            yield from ((node, []) for node in (first, *others))


def execution_order(plan: HookPlan, layer: Layer) -> list[list[str]]:
    """Return the specs at a layer, grouped by kind and role. Those of a group run in the order of the configuration."""
    places: dict[tuple[str, str], list[str]] = {}
    for site in plan.at(layer):
        names = places.setdefault((site.spec.kind, site.spec.tensor_role), [])
        if site.spec.name not in names:
            names.append(site.spec.name)
    return list(places.values())


def _line(plan: HookPlan, layer: Layer, inferred: InferredCalls, colours: Mapping[str, str]) -> Text:
    count = sum(parameter.numel() for parameter in layer.counted_parameters())
    outputs = [info for call in calls_of(layer.module, "output", inferred) for info in call]
    shapes = shorten([*dict.fromkeys(str(list(info.shape)) for info in outputs)], 3)
    facts = [
        f"{count:,} parameters" if count else "",
        shapes,
        f"also {', '.join(layer.aliases)}" if layer.aliases else "",
    ]
    line = Text.assemble(" ", ("  ".join([layer.type, *filter(None, facts)]), "dim"))
    for i, names in enumerate(execution_order(plan, layer)):
        for j, hook in enumerate(names):
            line.append(" → " if j else ", " if i else "  ")
            line.append(hook, colours[hook])
    return line
