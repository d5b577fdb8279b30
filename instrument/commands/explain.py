"""`instrument explain KEY`: what a configuration key, kind, action, statistic, rule, table, column or error means.

KEY is a key such as `train.steps` or `hooks.mine.every`, its last part, or a name such as `forward`, `clip`, `l2`, `dead_units`,
`stats.numel` or `ConfigError`. Without a KEY, all names are listed.

Exit codes: 0, explained; 2, nothing has this name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, get_args, get_origin

import yaml
from pydantic import BaseModel

from instrument import errors
from instrument.commands.verbs import add_json, parser_of, print_json, with_exit_codes
from instrument.config.apply import ACTIONS
from instrument.config.base import ACTIONS as HOOK_ACTIONS
from instrument.config.base import HookBase
from instrument.config.budget import BudgetConfig
from instrument.config.experiment import (
    CheckpointConfig,
    DataConfig,
    ForwardConfig,
    InitFromConfig,
    RunConfig,
    SinkConfig,
    SliceSpec,
    TrainConfig,
)
from instrument.config.modify import FUNCTIONS, FunctionSpec
from instrument.config.rules import RULES, CustomRule, RuleBase, WatchRule
from instrument.errors import ConfigError, InstrumentError, Problem, similar_names
from instrument.fields.field_types import Selection, Target
from instrument.tables.kinds import KINDS
from instrument.tables.schemas import TABLES
from instrument.tables.statistics import STATISTICS

SECTIONS: dict[str, tuple[type[BaseModel], str]] = {
    "Root keys": (RunConfig, "{name: mine, seed: 1, device: cpu, objective: accuracy, report: true}"),
    "`data`": (DataConfig, "{data: {dataset: {_target_: mymodule.MyData}, slice: {stop: 640}}}"),
    "`data.slice` and `data.eval_slice`": (
        SliceSpec,
        "{data: {slice: {split: train, classes: [0, 1], per_class: 100}}}",
    ),
    "`train`": (TrainConfig, "{train: {steps: 100, batch_size: 32, accumulate: 2, eval_every: 50}}"),
    "`train.checkpoint`": (CheckpointConfig, "{train: {checkpoint: {every: 100}}}"),
    "`forward`": (ForwardConfig, "{mode: forward, forward: {passes: 2, grad: true, of: 'logits[:, 3]'}}"),
    "`init_from`": (InitFromConfig, "{init_from: {path: weights.pt, strict: false}}"),
    "`sink`": (SinkConfig, "{sink: {tensorboard: true, on_error: continue}}"),
    "`budget`": (BudgetConfig, "{budget: {time: 5%, bytes: 2GB}}"),
}
"""The sections of a configuration, each with an example."""

HOOKS: dict[str, tuple[type[HookBase], str]] = {
    "record": (
        HOOK_ACTIONS["record"],
        "{layers: '**', kind: forward, action: record, every: 10, stats: [default, dead_fraction]}",
    ),
    "print": (
        HOOK_ACTIONS["print"],
        "{layers: encoder.*, kind: forward, action: print, steps: [0], stats: [mean, std, abs_max]}",
    ),
    "call": (HOOK_ACTIONS["call"], "{layers: encoder.1, kind: forward, action: call, fn: {_target_: mymodule.look}}"),
    "clip": (HOOK_ACTIONS["clip"], "{layers: '**', kind: parameter_grad, action: clip, norm: 1.0}"),
    "scale": (HOOK_ACTIONS["scale"], "{layers: encoder.1, kind: full_backward, action: scale, factor: 0.5}"),
    "zero": (FUNCTIONS["zero"], "{layers: encoder.1, kind: forward, action: modify, fn: zero}"),
    "add": (FUNCTIONS["add"], "{layers: encoder.1, kind: forward, action: modify, fn: add, value: 0.5, units: [3]}"),
    "project_out, project_onto": (
        FUNCTIONS["project_out"],
        "{layers: encoder.1, kind: forward, action: modify, fn: project_out, run: runs/a, components: 2}",
    ),
    "mean_ablate": (
        FUNCTIONS["mean_ablate"],
        "{layers: encoder.1, kind: forward, action: modify, fn: mean_ablate, run: runs/a, units: [3]}",
    ),
    "swap": (FUNCTIONS["swap"], "{layers: encoder.1, kind: forward, action: modify, fn: swap, samples: [0, 1]}"),
    "noise": (FUNCTIONS["noise"], "{layers: encoder.0, kind: forward, action: modify, fn: noise, std: 0.05}"),
    "mean": (FUNCTIONS["mean"], "{layers: encoder.1, kind: forward, action: modify, fn: mean, dim: 0}"),
    "resample": (FUNCTIONS["resample"], "{layers: encoder.1, kind: forward, action: modify, fn: resample}"),
    "shuffle": (FUNCTIONS["shuffle"], "{layers: encoder.1, kind: forward, action: modify, fn: shuffle}"),
    "dropout": (FUNCTIONS["dropout"], "{layers: encoder.1, kind: forward, action: modify, fn: dropout, p: 0.1}"),
    "quantize": (FUNCTIONS["quantize"], "{layers: '**', kind: forward, action: modify, fn: quantize, to: int8}"),
    "sign": (FUNCTIONS["sign"], "{layers: encoder.1, kind: forward, action: modify, fn: sign, straight_through: true}"),
    "nan": (FUNCTIONS["nan"], "{layers: encoder.1, kind: forward, action: modify, fn: nan, count: 2, steps: [5]}"),
    "l1, l2": (FUNCTIONS["l2"], "{layers: '**', kind: parameter_grad, action: modify, fn: l2, coefficient: 1.0e-4}"),
    "replace, patch": (
        FUNCTIONS["patch"],
        "{layers: encoder.1, kind: forward, action: modify, fn: patch, run: runs/a, slice: ':, 0:4'}",
    ),
    "{_target_: ...}": (
        FunctionSpec,
        "{layers: encoder.1, kind: forward, action: modify, fn: {_target_: mymodule.half_off, share: 0.25}}",
    ),
}
"""The actions of hooks, and the functions of `modify`, each with an example."""

APPLY: dict[str, str] = {
    "init": "{types: [Conv2d, Linear], action: init, fn: kaiming_normal_, nonlinearity: relu}",
    "fill": "{layers: encoder.0.0, params: bias, action: fill, value: 0.1}",
    "freeze": "{layers: encoder.**, action: freeze}",
    "replace": "{types: ReLU, action: replace, module: {_target_: torch.nn.GELU}}",
    "wrap": "{layers: encoder.0, action: wrap, module: {_target_: mymodule.Residual}}",
    "set": "{types: ReLU, action: set, attribute: inplace, value: false}",
    "add_parameter": "{layers: decoder, action: add_parameter, parameter: temperature, value: 1.0}",
    "call": "{types: Linear, action: call, fn: {_target_: mymodule.tie}}",
}
"""The actions of `apply`, each with an example."""


RULE_EXAMPLES: tuple[tuple[str, type[RuleBase], str], ...] = (
    ("`watch`", WatchRule, "{watch: activations, stat: std, below: 1.0e-3, for: 20, then: [warn, checkpoint]}"),
    ("`_target_`", CustomRule, "{_target_: mymodule.MyRule, then: stop}"),
)
"""The rules that are not in the catalogue, each with an example."""


FIELDS = yaml.safe_load("""
role: {layers: '**', kind: forward, role: input, action: record}
path: {layers: encoder, kind: forward, path: last_hidden_state, action: record}
fraction: {kind: collective, functions: all_reduce, action: modify, fn: zero, fraction: 0.01}
ranks: {kind: collective, functions: all_reduce, action: modify, fn: zero, ranks: [1]}
stop: {layers: '**', kind: forward, stop: 100, action: record}
steps: {layers: '**', kind: forward, steps: [0, 10, 100], action: record}
when: {layers: '**', kind: parameter_grad, action: clip, norm: 1.0, when: {stat: l2, above: 10, times: median}}
keep_as: {layers: encoder.1, kind: forward, action: record, keep_as: hidden}
units: {layers: encoder.1, kind: forward, action: record, units: [0, 3]}
unit_dim: {layers: encoder.1, kind: forward, action: record, units: [0, 3], unit_dim: -1}
heads: {layers: '**.c_proj', kind: forward_pre, action: record, heads: {of: 12, take: [5]}}
positions: {layers: blocks.1, kind: forward, action: record, positions: [-1]}
samples: {layers: blocks.1, kind: forward, action: record, tensors: true, samples: [0, 1]}
slice: {layers: blocks.1, kind: forward, action: record, slice: ':, 0:16'}
quantiles: {layers: '**', kind: forward, action: record, quantiles: [0.01, 0.5, 0.99]}
histogram: {layers: '**', kind: forward, action: record, histogram: 64}
spectrum: {layers: '**', kind: step_post, role: param, action: record, spectrum: 4}
experts: {layers: '**.router', kind: forward, action: record, experts: 2}
capacity_factor: {layers: '**.router', kind: forward, action: record, experts: 2, capacity_factor: 1.25}
position_losses: {layers: head, kind: forward, action: record, position_losses: true}
cast: {layers: '**', kind: forward, action: record, cast: float8_e4m3fn}
keep: {layers: '**', kind: forward, action: record, tensors: true, keep: 10}
split_dim: {layers: '**', kind: function, functions: softmax, role: attention, action: record, split_dim: 1}
max_elements: {layers: '**', kind: forward, action: record, tensors: true, max_elements: 1000}
dtype: {layers: '**', kind: forward, action: record, tensors: true, dtype: float16}
min: {layers: '**', kind: forward, action: clip, min: -10, max: 10}
max: {layers: '**', kind: forward, action: clip, min: -10, max: 10}
value: {layers: '**', kind: parameter_grad, action: clip, value: 0.5}
quantile: {layers: '**', kind: forward, action: clip, quantile: 0.99}
ratio: {layers: '**', kind: parameter_grad, action: clip, ratio: 0.01}
scope: {layers: '**', kind: parameter_grad, action: clip, norm: 1.0, scope: tensor}
dim: {layers: encoder.1, kind: full_backward, action: scale, factor: [0.5, 1, 1], dim: -1}
vector: {layers: blocks.1, kind: forward, action: modify, fn: add, vector: direction.npy}
key: {layers: blocks.1, kind: forward, action: modify, fn: add, vector: directions.safetensors, key: truth}
plus: {layers: blocks.1, kind: forward, action: modify, fn: add, plus: runs/yes, minus: runs/no}
minus: {layers: blocks.1, kind: forward, action: modify, fn: add, plus: runs/yes, minus: runs/no}
layer: {layers: blocks.1, kind: forward, action: modify, fn: mean_ablate, run: runs/clean, layer: blocks.0}
hook: {layers: blocks.1, kind: forward, action: modify, fn: mean_ablate, run: runs/clean, hook: kept}
step: {layers: blocks.1, kind: forward, action: modify, fn: patch, run: runs/clean, step: 100, units: [3]}
from_sample: {layers: blocks.1, kind: forward, action: modify, fn: patch, from_sample: 0, samples: [1]}
from: {rule: reference, from: runs/healthy}
for: {rule: dead_units, for: 20}
stats: {rule: reference, from: runs/healthy, stats: [l2, std]}
margin: {rule: reference, from: runs/healthy, margin: 2}
above: {watch: activations, stat: std, above: 10, for: 20}
""")
"""Specs of hooks and rules with a field that has no default, or requires another one."""
SETTINGS = yaml.safe_load("""
vars: {vars: {width: 64}}
forward: {mode: forward, forward: {passes: 2}}
forward.from_sample: {mode: forward, forward: {grad: true, from_sample: 0}}
forward.of: {mode: forward, forward: {grad: true, of: 'logits[:, 3]'}}
init_from: {init_from: {path: runs/trained/weights.pt}}
resume: {resume: runs/mnist_hooks/2026-01-31}
model: {model: {_target_: mymodule.Net, width: 64}}
task: {task: {_target_: mymodule.my_task}}
optimizer: {optimizer: {_target_: torch.optim.AdamW, lr: 0.001}}
scheduler: {scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 100}}
data: {data: {dataset: {_target_: mymodule.MyData}, slice: {stop: 640}}}
data.slice.indices: {data: {slice: {indices: [0, 5, 7]}}}
data.slice.stop: {data: {slice: {stop: 640}}}
data.slice.classes: {data: {slice: {classes: [0, 1]}}}
data.slice.per_class: {data: {slice: {per_class: 100}}}
data.eval_slice: {data: {eval_slice: {split: test}}}
data.slice.split: {data: {slice: {split: train}}}
data.probe_batch: {data: {probe_batch: 64}, hooks: {mine: {layers: '**', kind: forward, phase: probe, action: record}}}
data.fallback: {data: {fallback: digits}}
data.collate_fn: {data: {collate_fn: {_target_: mymodule.collate}}}
data.sampler: {data: {sampler: {_target_: mymodule.Sampler}}}
train: {train: {steps: 100, batch_size: 32, eval_every: 50}}
train.epochs: {train: {epochs: 2}}
train.find_unused_parameters: {train: {parallel: ddp, find_unused_parameters: true}}
train.compile: {train: {compile: true}}
train.compile.dynamic: {train: {compile: {dynamic: true}}}
train.checkpoint: {train: {checkpoint: {every: 100}}}
train.fingerprint: {train: {fingerprint: 5be7d1a204c1f3aa-90b1e7d35ad80c44}}
train.parallel: {train: {parallel: {mesh: {dp: 2, tp: 2}, plan: {'**.up': colwise, '**.down': rowwise}}}}
train.parallel.placement: {train: {parallel: {mesh: {tp: 2}, plan: {'**.up': colwise}, placement: {mix: {output: {tp: replicate}}}}}}
train.parallel.experts:
  {train: {parallel: {mesh: {dp: 2}, experts: {'**.moe': {_target_: torch.distributed.tensor.parallel.ExpertParallel}}}}}
train.parallel.pipeline: {train: {parallel: {mesh: {pp: 2}, pipeline: {split: [blocks.2], schedule: 1f1b}}}}
apply: {apply: {mine: {types: Linear, action: init, fn: zeros_}}}
hooks: {hooks: {mine: {layers: '**', kind: forward, action: record}}}
rules: {rules: {mine: {rule: dead_units}}}
budget: {budget: {time: 5%, bytes: 2GB}}
sink.tensors: {sink: {tensors: bytes}}
sink: {sink: {remote: 's3://bucket/runs'}}
sink._target_: {sink: {_target_: mymodule.MySink}}
""")
"""Configurations with a key that has no default, or requires another one. A key without an entry has that of its section."""


@dataclass(frozen=True)
class Entry:
    """What one name means.

    Attributes:
        key: The name. `NAME` stands for the name of a hook, an `apply` spec or a rule.
        what: What it is, such as `configuration key` or `statistic`.
        meaning: What it means.
        type: The type of its values; empty without values.
        default: Its default as YAML; None without one.
        unit: Its unit; empty without one.
        example: An example as YAML.
    """

    key: str
    what: str
    meaning: str
    type: str = ""
    default: str | None = None
    unit: str = ""
    example: str = ""

    def __str__(self) -> str:
        lines = [f"{self.key}  ({self.what})", f"  meaning  {self.meaning}"]
        lines += [f"  {name:<7}  {value}" for name in ("type", "unit", "default") if (value := getattr(self, name))]
        example = self.example.strip().replace("\n", f"\n{'':<11}")
        return "\n".join([*lines, *([f"  example  {example}"] if example else [])])


def command_line() -> Any:
    parser = parser_of("explain")
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a key or a name; none lists all")
    add_json(parser)
    return parser


@with_exit_codes
def main(arguments: Sequence[str] | None = None) -> int:
    args = command_line().parse_args(arguments)
    known = list(entries())
    found = [entry for key in args.keys for entry in explain(key, known)] if args.keys else known
    if args.json:
        print_json(found)
    elif args.keys:
        print("\n\n".join(map(str, found)))
    else:
        names = _by_kind(entry for entry in known if not entry.what.startswith(("field of", "column of")))
        print("\n".join(f"{what}: {', '.join(keys)}" for what, keys in names.items()))
    return 0


def explain(key: str, known: Iterable[Entry]) -> list[Entry]:
    """Return the entries of a key or a name.

    Raises:
        ConfigError: There are none.
    """
    known = list(known)
    parts = key.split(".")
    if len(parts) > 2 and parts[0] in ("hooks", "apply", "rules"):
        parts[1] = "NAME"
    wanted = ".".join(parts)
    found = [entry for entry in known if wanted in (entry.key, entry.key.rpartition(".")[2])]
    if not found:
        names = {name for entry in known for name in (entry.key, entry.key.rpartition(".")[2])}
        fix = "instrument explain lists all names"
        raise ConfigError(Problem("KEY", "nothing has this name", key, similar=similar_names(wanted, names), fix=fix))
    return found


def entries() -> Iterator[Entry]:
    """Yield everything that can be explained."""
    yield from _config_keys(RunConfig, "")
    yield from _fields("hooks.NAME.", HookBase, "field of every hook", "{layers: '**', kind: forward, action: record}")
    for name, (model, example) in HOOKS.items():
        is_action = name in HOOK_ACTIONS
        title = name if is_action else f"modify, fn: {name}"
        what = "action of hooks" if is_action else "function of action modify"
        for each in name.split(", "):
            yield Entry(each, what, sentences(model), example=_yaml({"hooks": {"mine": yaml.safe_load(example)}}))
        yield from _fields("hooks.NAME.", model, f"field of hooks with action: {title}", example, without=HookBase)
    yield from _fields("apply.NAME.", Selection, "field of every apply spec", APPLY["freeze"])
    for name, example in APPLY.items():
        of_action = ACTIONS[name]
        yield Entry(
            name,
            "action of apply",
            sentences(of_action),
            example=_yaml({"apply": {"mine": yaml.safe_load(example)}}),
        )
        yield from _fields("apply.NAME.", of_action, f"field of apply: {name}", example, without=Selection)
    yield from _fields("rules.NAME.", RuleBase, "field of every rule", "{rule: dead_units}")
    for name, rule in sorted(RULES.items()):
        example = f"{{rule: {name}{', from: runs/healthy' * (name == 'reference')}}}"
        meaning = f"{sentences(rule.fields)} It reads {rule.requires}. {rule.advice}"
        yield Entry(name, "rule", meaning, example=_yaml({"rules": {"mine": yaml.safe_load(example)}}))
        yield from _fields("rules.NAME.", rule.fields, f"field of rule {name}", example, without=RuleBase)
    for _, spec, example in RULE_EXAMPLES:
        yield from _fields("rules.NAME.", spec, "field of a custom rule", example, without=RuleBase)
    for kind in KINDS.values():
        meaning, roles = f"An intervention changes: {kind.meaning}", f"roles {', '.join(kind.roles)}"
        yield Entry(kind.name, "kind of hooks", meaning, roles, example=_record(kind.name))
    for statistic in STATISTICS.values():
        kind_and_role = statistic.only[0] if statistic.only else ("forward",)
        example = _record(*kind_and_role, stats=[statistic.name])
        yield Entry(statistic.name, "statistic", statistic.meaning, unit=statistic.unit, example=example)
    for table in TABLES.values():
        yield Entry(table.name, "table", f"A row is {table.row}.", example=f"instrument.load(RUN).{table.name}")
        for column in table.columns:
            yield Entry(
                f"{table.name}.{column.name}",
                f"column of {table.name}",
                column.meaning,
                column.type_name,
                unit=column.unit,
            )
    for name in errors.__all__:
        error = getattr(errors, name)
        if isinstance(error, type) and issubclass(error, InstrumentError):
            yield Entry(name, f"error, exit code {error.exit_code}", (error.__doc__ or "").split("\n\n")[0])


def _config_keys(model: type[BaseModel], prefix: str) -> Iterator[Entry]:
    """Yield the keys of a section and of the sections in it."""
    example = next((example for each, example in SECTIONS.values() if each is model), "{}")
    yield from _fields(prefix, model, "configuration key", example)
    for name, field in model.model_fields.items():
        for section in _models(field.annotation):
            if section is not Target:
                yield from _config_keys(section, f"{prefix}{field.alias or name}.")


def _fields(
    prefix: str, model: type[BaseModel], what: str, example: str, without: type[BaseModel] | None = None
) -> Iterator[Entry]:
    """Yield the fields of a model, except those that another model describes in the same words."""
    schema = model.model_json_schema(by_alias=True)
    properties, definitions = schema["properties"], schema.get("$defs", {})
    shared = {} if without is None else without.model_fields
    for name, field in model.model_fields.items():
        key = field.alias or name
        described = properties[key]
        if (
            f"{prefix}{key}" == "data.probe_batch.split"
            or "const" in described
            or (name in shared and field.description == shared[name].description)
        ):
            continue
        default = None if field.is_required() or field.default_factory is not None else described.get("default")
        yield Entry(
            f"{prefix}{key}",
            what,
            field.description or sentences_of_section(described, definitions),
            type_text(described, definitions).replace("`", ""),
            "required" if field.is_required() else None if field.default_factory is not None else value_text(default),
            example=_example_of(prefix, key, yaml.safe_load(example), default),
        )


def _example_of(prefix: str, key: str, example: dict[str, Any], default: object) -> str:
    """Return a configuration with a field, from an example of its section or spec."""
    sections = prefix.split(".")[:-1]
    if "NAME" in sections:
        first = sections[0]
        spec = {**example, key: example.get(key, default)}
        if (
            key not in example
            and key in FIELDS
            and (first == "rules") == FIELDS[key].keys().isdisjoint(["layers", "kind"])
        ):
            spec = FIELDS[key]
        return _yaml({first: {"mine": spec}})
    name = f"{prefix}{key}"
    is_in_section = any("." in each and name.startswith(f"{each}.") for each in SETTINGS)
    if name not in SETTINGS and default is not None and not is_in_section:
        content = {key: default}
        for section in reversed(sections):
            content = {section: content}
        return _yaml(content)
    if name in SETTINGS:
        return _yaml(SETTINGS[name])
    if default is None and sections[-1] in ("eval_slice", "probe_batch"):
        default = SETTINGS[f"data.slice.{key}"]["data"]["slice"][key]
    while name not in SETTINGS:
        name = name.rpartition(".")[0]
    content = section = deepcopy(SETTINGS[name])
    for each in sections:
        if not isinstance(section[each], dict):
            section[each] = {}
        section = section[each]
    if default is not None:
        section.setdefault(key, default)
    return _yaml(content)


def _record(kind: str, role: str = "", **fields: Any) -> str:
    """Return a record hook of a kind."""
    spec: dict[str, Any] = {
        "layers": "**",
        "kind": kind,
        "role": role,
        "functions": "softmax",
        "action": "record",
        **fields,
    }
    unused = (not role) * ["role"] + (kind == "collective") * ["layers"]
    unused += ["functions"] * (kind not in ("function", "function_grad"))
    return _yaml({"hooks": {"mine": {name: value for name, value in spec.items() if name not in unused}}})


def _yaml(content: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [] if get_origin(annotation) is dict else [model for each in get_args(annotation) for model in _models(each)]


def type_text(described: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the type of a field in words, from its JSON Schema."""
    if "const" in described:
        return f"`{described['const']}`"
    if len(described.get("enum", ())) > 6:
        return "name"
    if "enum" in described:
        return ", ".join(f"`{each}`" for each in described["enum"])
    if "$ref" in described:
        name = described["$ref"].rpartition("/")[2]
        return "target" if name == "Target" else "section"
    if "anyOf" in described:
        types = dict.fromkeys(type_text(each, definitions) for each in described["anyOf"] if each.get("type") != "null")
        if "string" in types:
            types.pop("integer", None)  # YAML reads names such as 1 as integers
        return " or ".join(types)
    if described.get("type") == "array":
        item: Mapping[str, Any] = described.get("items") or next(iter(described.get("prefixItems", ())), {})
        kind = type_text(item, definitions)
        return f"list of {kind}" + ("" if "`" in kind else "s")
    if described.get("type") == "object":
        return "mapping"
    return str(described.get("type", "any value"))


def value_text(value: object) -> str:
    if value in ((), [], {}) or value is None:
        return "null" if value is None else str(value)
    return str(value).lower() if isinstance(value, bool) else str(value) or "''"


def sentences(model: type[BaseModel]) -> str:
    """Return what a model is, from its docstring."""
    return " ".join((model.__doc__ or "").split())


def sentences_of_section(described: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return what the section of a field is, from its JSON Schema; an empty text if the field has no section."""
    reference = described.get("$ref") or next((each["$ref"] for each in described.get("allOf", ())), "")
    return " ".join(definitions.get(reference.rpartition("/")[2], {}).get("description", "").split())


def _by_kind(known: Iterable[Entry]) -> dict[str, list[str]]:
    """Return the names of entries by what they are."""
    names: dict[str, dict[str, None]] = {}
    for entry in known:
        names.setdefault(entry.what, {})[entry.key] = None
    return {what: [*keys] for what, keys in names.items()}


if __name__ == "__main__":
    sys.exit(main())
