"""`instrument explain KEY`: what a configuration key, kind, action, statistic, rule, table, column, error or Python name means.

KEY is a key such as `train.steps` or `hooks.mine.every`, its last part, or a name such as `forward`, `clip`, `l2`, `dead_units`,
`stats.numel`, `run.findings`, `attach` or `ConfigError`. Without a KEY, all names are listed.

Exit codes: 0, explained; 2, nothing has this name.
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from importlib import import_module
from types import ModuleType
from typing import Any

import yaml
from pydantic import BaseModel

from instrument import errors
from instrument.commands.verbs import add_json, parser_of, print_json, with_arguments
from instrument.config.apply import ACTIONS
from instrument.config.base import ACTIONS as HOOK_ACTIONS
from instrument.config.base import HookBase
from instrument.config.experiment import RunConfig
from instrument.config.hook_specs import FUNCTIONS, FunctionSpec
from instrument.config.rules import RULES, CustomRule, RuleBase, WatchRule
from instrument.config.schema import models_in
from instrument.config.spec_file import hook_sets
from instrument.errors import ConfigError, InstrumentError, Problem, similar_names
from instrument.fields.field_types import Selection, Target
from instrument.tables.kinds import KINDS
from instrument.tables.schemas import TABLES
from instrument.tables.statistics import STATISTICS

CONFIGS: list[dict[str, Any]] = yaml.safe_load("""
- {name: mine, seed: 1, device: cpu, objective: accuracy, report: true}
- {data: {dataset: {_target_: mymodule.MyData}, slice: {stop: 640}}}
- {data: {slice: {split: train, classes: [0, 1], per_class: 100}}}
- {train: {steps: 100, batch_size: 32, accumulate: 2, eval_every: 50}}
- {train: {checkpoint: {every: 100}}}
- {mode: forward, forward: {passes: 2, grad: true, of: 'logits[:, 3]'}}
- {init_from: {path: weights.pt, strict: false}}
- {sink: {tensorboard: true, on_error: continue}}
- {budget: {time: 5%, bytes: 2GB}}
- {hooks: {mine: {layers: '**', kind: forward, action: record}}, rules: {mine: {rule: dead_units}}}
- {vars: {width: 64}}
- {mode: forward, forward: {grad: true, from_sample: 0}}
- {resume: runs/mnist_hooks/2026-01-31}
- {model: {_target_: mymodule.Net, width: 64}}
- {task: {_target_: mymodule.my_task}}
- {optimizer: {_target_: torch.optim.AdamW, lr: 0.001}, scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 100}}
- {data: {slice: &indices {indices: [0, 5, 7]}}}
- {data: {eval_slice: &classes {split: test, classes: [0, 1], per_class: 100}}}
- {data: {eval_slice: {stop: 640}}}
- {data: {eval_slice: *indices}}
- {data: {probe_batch: 64}, hooks: &probe {mine: {layers: '**', kind: forward, phase: probe, action: record}}}
- {data: {probe_batch: {stop: 64}}, hooks: *probe}
- {data: {probe_batch: {classes: [0, 1], per_class: 100}}, hooks: *probe}
- {data: {probe_batch: *indices}, hooks: *probe}
- {data: {fallback: digits}}
- {data: {collate_fn: {_target_: mymodule.collate}, sampler: {_target_: mymodule.Sampler}}}
- {train: {parallel: {mesh: {dp: 2, tp: 2}, plan: {'**.up': colwise, '**.down': rowwise}}}}
- {train: {epochs: 2}}
- {train: {parallel: ddp, find_unused_parameters: true}}
- {train: {compile: true}}
- {train: {compile: {dynamic: true}}}
- {train: {fingerprint: 5be7d1a204c1f3aa-90b1e7d35ad80c44}}
- {train: {parallel: {mesh: {tp: 2}, plan: {'**.up': colwise}, placement: {mix: {output: {tp: replicate}}}}}}
- {train: {parallel: {mesh: {dp: 2}, experts: {'**.moe': {_target_: torch.distributed.tensor.parallel.ExpertParallel}}}}}
- {train: {parallel: {mesh: {pp: 2}, pipeline: {split: [blocks.2], schedule: 1f1b}}}}
- {apply: {mine: {types: Linear, action: init, fn: zeros_}}}
- {sink: {tensors: bytes, remote: 's3://bucket/runs'}}
- {sink: {_target_: mymodule.MySink}}
""")
"""Examples of configurations. The example of a key is the first one that has it, or else its section and its default. The first ones are
those of the sections in docs/reference/config.md, in the same order.
"""

HOOKS: dict[str, dict[str, Any]] = yaml.safe_load("""
record: {layers: '**', kind: forward, action: record, every: 10, stats: [default, dead_fraction]}
print: {layers: encoder.*, kind: forward, action: print, steps: [0], stats: [mean, std, abs_max]}
call: {layers: encoder.1, kind: forward, action: call, fn: {_target_: mymodule.look}}
clip: {layers: '**', kind: parameter_grad, action: clip, norm: 1.0}
scale: {layers: encoder.1, kind: full_backward, action: scale, factor: 0.5}
zero: {layers: encoder.1, kind: forward, action: modify, fn: zero}
add: {layers: encoder.1, kind: forward, action: modify, fn: add, value: 0.5, units: [3]}
project_out, project_onto: {layers: encoder.1, kind: forward, action: modify, fn: project_out, run: runs/a, components: 2}
mean_ablate: {layers: encoder.1, kind: forward, action: modify, fn: mean_ablate, run: runs/a, units: [3]}
swap: {layers: encoder.1, kind: forward, action: modify, fn: swap, samples: [0, 1]}
noise: {layers: encoder.0, kind: forward, action: modify, fn: noise, std: 0.05}
mean: {layers: encoder.1, kind: forward, action: modify, fn: mean, dim: 0}
resample: {layers: encoder.1, kind: forward, action: modify, fn: resample}
shuffle: {layers: encoder.1, kind: forward, action: modify, fn: shuffle}
dropout: {layers: encoder.1, kind: forward, action: modify, fn: dropout, p: 0.1}
quantize: {layers: '**', kind: forward, action: modify, fn: quantize, to: int8}
sign: {layers: encoder.1, kind: forward, action: modify, fn: sign, straight_through: true}
nan: {layers: encoder.1, kind: forward, action: modify, fn: nan, count: 2, steps: [5]}
l1, l2: {layers: '**', kind: parameter_grad, action: modify, fn: l2, coefficient: 1.0e-4}
replace, patch: {layers: encoder.1, kind: forward, action: modify, fn: patch, run: runs/a, slice: ':, 0:4'}
'{_target_: ...}': {layers: encoder.1, kind: forward, action: modify, fn: {_target_: mymodule.half_off, share: 0.25}}
""")
"""The actions of hooks, and the functions of `modify`, each with an example."""

APPLY: dict[str, dict[str, Any]] = yaml.safe_load("""
init: {types: [Conv2d, Linear], action: init, fn: kaiming_normal_, nonlinearity: relu}
fill: {layers: encoder.0.1, params: bias, action: fill, value: 0.1}
freeze: {layers: encoder.**, action: freeze}
replace: {types: ReLU, action: replace, module: {_target_: torch.nn.GELU}}
wrap: {layers: encoder.0, action: wrap, module: {_target_: mymodule.Residual}}
set: {types: ReLU, action: set, attribute: inplace, value: false}
add_parameter: {layers: decoder, action: add_parameter, parameter: temperature, value: 1.0}
call: {types: Linear, action: call, fn: {_target_: mymodule.tie}}
""")
"""The actions of `apply`, each with an example."""

_WATCH = {"watch": "activations", "stat": "std", "below": 1e-3, "for": 20, "then": ["warn", "checkpoint"]}
CUSTOM_RULES: dict[str, tuple[type[RuleBase], dict[str, Any]]] = {
    "`watch`": (WatchRule, _WATCH),
    "`_target_`": (CustomRule, {"_target_": "mymodule.MyRule", "then": "stop"}),
}
"""The rules that are not in the catalogue, each with an example."""

FIELDS: list[dict[str, Any]] = yaml.safe_load("""
- {layers: '**', kind: forward, role: input, action: record}
- {layers: encoder, kind: forward, path: last_hidden_state, action: record}
- {layers: '**', kind: function, functions: softmax, role: attention, action: record, split_dim: 1}
- {kind: collective, functions: all_reduce, action: modify, fn: zero, fraction: 0.01, ranks: [1]}
- {layers: '**', kind: forward, stop: 100, action: record}
- {layers: '**', kind: forward, steps: [0, 10, 100], action: record}
- {layers: '**', kind: parameter_grad, action: clip, norm: 1.0, when: {stat: l2, above: 10, times: median}}
- {layers: encoder.1, kind: forward, action: record, keep_as: hidden}
- {layers: encoder.1, kind: forward, action: record, units: [0, 3], unit_dim: -1}
- {layers: '**.c_proj', kind: forward_pre, action: record, heads: {of: 12, take: [5]}}
- {layers: blocks.1, kind: forward, action: record, tensors: true, samples: [0, 1], positions: [-1]}
- {layers: blocks.1, kind: forward, action: record, slice: ':, 0:16'}
- {layers: '**', kind: forward, action: record, quantiles: [0.01, 0.5, 0.99], histogram: 64}
- {layers: '**', kind: step_post, role: param, action: record, spectrum: 4}
- {layers: '**.router', kind: forward, action: record, experts: 2, capacity_factor: 1.25}
- {layers: head, kind: forward, action: record, position_losses: true}
- {layers: '**', kind: forward, action: record, cast: float8_e4m3fn}
- {layers: '**', kind: forward, action: record, tensors: true, keep: 10}
- {layers: '**', kind: forward, action: record, tensors: true, max_elements: 1000, dtype: float16}
- {layers: '**', kind: forward, action: clip, min: -10, max: 10}
- {layers: '**', kind: parameter_grad, action: clip, value: 0.5}
- {layers: '**', kind: forward, action: clip, quantile: 0.99}
- {layers: '**', kind: parameter_grad, action: clip, ratio: 0.01}
- {layers: '**', kind: parameter_grad, action: clip, norm: 1.0, scope: tensor}
- {layers: encoder.1, kind: full_backward, action: scale, factor: [0.5, 1, 1], dim: -1}
- {layers: blocks.1, kind: forward, action: modify, fn: add, vector: directions.safetensors, key: truth}
- {layers: blocks.1, kind: forward, action: modify, fn: add, plus: runs/yes, minus: runs/no}
- {layers: blocks.1, kind: forward, action: modify, fn: mean_ablate, run: runs/clean, layer: blocks.0, hook: kept}
- {layers: blocks.1, kind: forward, action: modify, fn: patch, run: runs/clean, step: 100, units: [3]}
- {layers: blocks.1, kind: forward, action: modify, fn: patch, from_sample: 0, samples: [1]}
- {layers: '**', exclude: head, types: [Linear], params: weight, kind: parameter_grad, action: record}
- {structure: [attention], kind: forward, action: record}
- {layers: lm_head, kind: forward, action: record, calls: '10:20'}
- {layers: encoder.**, exclude: encoder.0, types: [Linear], params: bias, action: freeze}
- {structure: [embedding], action: freeze}
- {layers: decoder, action: add_parameter, parameter: scale, value: 1.0, shape: [16]}
- {rule: dead_units, hook: activations}
- {rule: reference, from: runs/healthy, stats: [l2, std], margin: 2}
- {watch: activations, stat: std, above: 10, for: 20}
""")
"""Specs of hooks and rules with fields that have no default, or require another one."""


@dataclass(frozen=True)
class Term:
    """What one name means. In a key, `NAME` stands for the name of a hook, an `apply` spec or a rule. Examples and defaults are YAML."""

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


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("explain")
    parser.add_argument("keys", metavar="KEY", nargs="*", help="a key or a name; none lists all")
    add_json(parser)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    known = [*entries(), *([] if args.keys else python_entries())]
    found = [entry for key in args.keys for entry in explain(key, known)] if args.keys else known
    if args.json:
        print_json(found)
    elif args.keys:
        print("\n\n".join(map(str, found)))
    else:
        names: dict[str, dict[str, None]] = {}
        for entry in known:
            if not entry.what.startswith(("field of", "column of")):
                names.setdefault(entry.what, {})[entry.key] = None
        print("\n".join(f"{what}: {', '.join(keys)}" for what, keys in names.items()))
    return 0


def explain(key: str, known: Iterable[Term]) -> list[Term]:
    """Return the entries of a key or a name; raise a `ConfigError` if there are none.

    Python names are read only if nothing else has the name, because importing the package takes seconds.
    """
    wanted = re.sub(r"^(hooks|apply|rules)\.[^.]+(?=\.)", r"\1.NAME", key)
    wanted = re.sub(r"^sweep\.", "run.", wanted)
    of_spec = re.sub(r"^(hooks|apply|rules)\.(?=[^.]+$)", r"\1.NAME.", key)
    by_name: dict[str, list[Term]] = {}
    for group in (known, python_entries()):
        for entry in group:
            of_table = (f"run.{entry.key}", f"probe.{entry.key}") if entry.what == "table" else ()
            for name in {entry.key, entry.key.rpartition(".")[2], *of_table}:
                by_name.setdefault(name, []).append(entry)
        if name := next((name for name in (wanted, of_spec) if name in by_name), None):
            return by_name[name]
    similar, fix = similar_names(wanted, by_name), "instrument explain lists all names"
    raise ConfigError(Problem("KEY", "nothing has this name", key, similar=similar, fix=fix))


def model_of(action: str) -> type[HookBase]:
    return FunctionSpec if "_target_" in action else {**FUNCTIONS, **HOOK_ACTIONS}[action.rpartition(", ")[2]]


def entries() -> Iterator[Term]:
    yield from _config_keys(RunConfig, "")
    hook = {"layers": "**", "kind": "forward", "action": "record"}
    yield from _fields("hooks.NAME.", HookBase, "field of every hook", hook)
    for name, example in HOOKS.items():
        model, is_action = model_of(name), name in HOOK_ACTIONS
        what = "action of hooks" if is_action else "function of action modify"
        for each in name.split(", "):
            yield Term(each, what, sentences(model), example=_yaml({"hooks": {"mine": example}}))
        of = f"field of hooks with action: {'' if is_action else 'modify, fn: '}{name}"
        yield from _fields("hooks.NAME.", model, of, example, HookBase)
    for name, file in hook_sets().items():
        text = file.read_text()
        comment = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# ")]
        yield Term(name, f"hook set, hooks={name}", " ".join(comment), example=_yaml({"hooks": yaml.safe_load(text)}))
    yield from _fields("apply.NAME.", Selection, "field of every apply spec", APPLY["freeze"])
    for name, example in APPLY.items():
        yield Term(name, "action of apply", sentences(ACTIONS[name]), example=_yaml({"apply": {"mine": example}}))
        yield from _fields("apply.NAME.", ACTIONS[name], f"field of apply: {name}", example, Selection)
    yield from _fields("rules.NAME.", RuleBase, "field of every rule", {"rule": "dead_units"})
    for name, rule in sorted(RULES.items()):
        example = {"rule": name, **({"from": "runs/healthy"} if name == "reference" else {})}
        meaning = f"{sentences(rule.fields)} It reads {rule.requires}. {rule.advice}"
        yield Term(name, "rule", meaning, example=_yaml({"rules": {"mine": example}}))
        yield from _fields("rules.NAME.", rule.fields, f"field of rule {name}", example, RuleBase)
    for spec, example in CUSTOM_RULES.values():
        yield from _fields("rules.NAME.", spec, "field of a custom rule", example, RuleBase)
    for kind in KINDS.values():
        meaning, roles = f"An intervention changes: {kind.meaning}", f"roles {', '.join(kind.roles)}"
        yield Term(kind.name, "kind of hooks", meaning, roles, example=_record(kind.name))
    for statistic in STATISTICS.values():
        kind_and_role = statistic.only[0] if statistic.only else ("forward",)
        shown = _record(*kind_and_role, stats=[statistic.name])
        yield Term(statistic.name, "statistic", statistic.meaning, unit=statistic.unit, example=shown)
    for table in TABLES.values():
        call = "()" if table.name == "tensors" else ""
        yield Term(table.name, "table", f"A row is {table.row}.", example=f"instrument.load(RUN).{table.name}{call}")
        for column in table.columns:
            name, what = f"{table.name}.{column.name}", f"column of {table.name}"
            yield Term(name, what, column.meaning, column.type_name, unit=column.unit)
    for name in errors.__all__:
        error = getattr(errors, name)
        if isinstance(error, type) and issubclass(error, InstrumentError):
            yield Term(name, f"error, exit code {error.exit_code}", (error.__doc__ or "").split("\n\n")[0])


def python_entries() -> Iterator[Term]:
    """Yield the functions and classes of the package, and the attributes of `Run` (a run or a sweep) and of `AttachedProbe`."""
    package = import_module("instrument")
    for module in (package, package.plot, package.interpret, package.report):
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and name not in errors.__all__:
                function = value.__call__ if isinstance(value, ModuleType) else value
                yield _python_entry(f"{module.__name__}.{name}", f"name in {module.__name__}", function)
    for key, of, kind in (("run", "run or a sweep", package.Run), ("probe", "probe", package.AttachedProbe)):
        for name in dir(kind):
            if not name.startswith("_"):
                yield _python_entry(f"{key}.{name}", f"attribute of a {of}", inspect.getattr_static(kind, name))


def _python_entry(key: str, what: str, value: Any) -> Term:
    """Return the entry of a Python object: its signature, and its docstring up to the arguments, without code."""
    text = re.split(r"\n\n(?=[A-Z][a-z]+:\n)", inspect.getdoc(value) or "")[0]
    meaning = " ".join(each for each in text.split("\n\n") if not each.startswith("    "))
    signature = ""
    with suppress(ValueError):  # Python knows no signature of some classes, such as typed dictionaries.
        signature = str(inspect.signature(value)) if callable(value) else ""
    return Term(key, what, " ".join(meaning.split()), signature)


def _config_keys(model: type[BaseModel], prefix: str) -> Iterator[Term]:
    """Yield the keys of a section and of the sections in it."""
    yield from _fields(prefix, model, "configuration key", {})
    for name, field in model.model_fields.items():
        for section in models_in(field.annotation):
            if section is not Target:
                yield from _config_keys(section, f"{prefix}{field.alias or name}.")


def _fields(
    prefix: str, model: type[BaseModel], what: str, example: Mapping[str, Any], without: type[BaseModel] | None = None
) -> Iterator[Term]:
    """Yield the fields of a model, except those that another model describes in the same words."""
    schema = model.model_json_schema(by_alias=True)
    properties, definitions = schema["properties"], schema.get("$defs", {})
    shared = {} if without is None else without.model_fields
    for name, field in model.model_fields.items():
        key = field.alias or name
        described = properties[key]
        is_shared = name in shared and field.description == shared[name].description
        if f"{prefix}{key}" == "data.probe_batch.split" or "const" in described or is_shared:
            continue
        default = None if field.is_required() or field.default_factory is not None else described.get("default")
        shown = None if field.default_factory is not None else value_text(default)
        shown = "required" if field.is_required() else shown
        meaning = field.description or sentences_of_section(described, definitions)
        kind, shown_example = type_text(described, definitions), _example_of(prefix, key, example, default)
        yield Term(f"{prefix}{key}", what, meaning, kind.replace("`", ""), shown, example=shown_example)


def _example_of(prefix: str, key: str, example: Mapping[str, Any], default: object) -> str:
    """Return a configuration with a field, from an example of its spec."""
    path = prefix.split(".")[:-1]
    if path[1:] == ["NAME"]:
        sections = ("hooks" if "kind" in each else "apply" if "action" in each else "rules" for each in FIELDS)
        named = [each for each, section in zip(FIELDS, sections, strict=True) if key in each and path[0] == section]
        if key not in example:
            is_own = not named or (path[0] != "hooks" and default not in (None, []))
            example = {**example, key: default} if is_own else named[0]
        return _yaml({path[0]: {"mine": example}})
    content = section = deepcopy(max([{}, *CONFIGS], key=lambda each: _depth(each, [*path, key])))
    for name in path:
        if not isinstance(section.get(name), dict):
            section[name] = {}
        section = section[name]
    section.setdefault(key, default)
    return _yaml(content)


def _depth(content: Any, path: Sequence[str]) -> int:
    """Return how many sections of a path a configuration has."""
    has_first = isinstance(content, dict) and path and path[0] in content
    return 1 + _depth(content[path[0]], path[1:]) if has_first else 0


def _record(kind: str, role: str = "", **fields: Any) -> str:
    """Return an example of a record hook, as YAML. Further fields are passed to the hook."""
    spec = {"layers": "**", "kind": kind, "role": role, "functions": "softmax", "action": "record", **fields}
    unused = (not role) * ["role"] + (kind == "collective") * ["layers"]
    unused += ["functions"] * (kind not in ("function", "function_grad"))
    return _yaml({"hooks": {"mine": {name: value for name, value in spec.items() if name not in unused}}})


def _yaml(content: Mapping[str, Any]) -> str:
    return str(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=110))


def type_text(described: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return the type of a field in words, from its JSON Schema."""
    if values := [described["const"]] if "const" in described else described.get("enum", ()):
        return "name" if len(values) > 6 else ", ".join(f"`{each}`" for each in values)
    if "$ref" in described:
        return "target" if described["$ref"].endswith("/Target") else "section"
    if "anyOf" in described:
        types = dict.fromkeys(type_text(each, definitions) for each in described["anyOf"] if each.get("type") != "null")
        if "string" in types:
            types.pop("integer", None)  # YAML reads names such as 1 as integers
        return " or ".join(types)
    if described.get("type") == "array":
        item: Mapping[str, Any] = described.get("items") or next(iter(described.get("prefixItems", ())), {})
        kind = type_text(item, definitions)
        return f"list of {kind}" + ("" if "`" in kind else "s")
    return str(described.get("type", "any value")).replace("object", "mapping")


def value_text(value: object) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return str(value) or "''"


def sentences(model: type[BaseModel]) -> str:
    return " ".join((model.__doc__ or "").split())


def sentences_of_section(described: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """Return what the section of a field is, from its JSON Schema; an empty text if the field has no section."""
    reference = described.get("$ref") or next((each["$ref"] for each in described.get("allOf", ())), "")
    return " ".join(definitions.get(reference.rpartition("/")[2], {}).get("description", "").split())


if __name__ == "__main__":
    sys.exit(main())
