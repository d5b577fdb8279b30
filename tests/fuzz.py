"""Random mutations of a configuration and of command lines, reproducible by their number."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

CONFIG: dict[str, Any] = {
    "name": "fuzzed",
    "seed": 0,
    "device": "cpu",
    "deterministic": False,
    "plan": True,
    "quiet": False,
    "resume": None,
    "model": {"_target_": "instrument.training.models.MLP", "sizes": [64, 16, 10]},
    "data": {
        "dataset": {"_target_": "instrument.training.datasets.digits"},
        "slice": {"split": "train", "stop": 64, "classes": [0, 1, 2], "per_class": 4},
        "eval_slice": {"split": "test", "start": 3, "stride": 2},
    },
    "task": {"_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}},
    "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1, "momentum": 0.9},
    "scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 5},
    "train": {"steps": 10, "batch_size": 8, "accumulate": 2, "eval_every": 3, "checkpoint": {"every": 4}},
    "apply": {
        "init": {"types": ["Linear"], "action": "init", "fn": "kaiming_normal_", "nonlinearity": "relu"},
        "ice": {"layers": "layers.0.**", "action": "freeze"},
    },
    "hooks": {
        "seen": {"layers": "layers.**", "kind": "forward", "action": "record", "every": 5, "stats": ["mean", "l2"]},
        "kept": {
            "layers": ["layers.0", "layers.1"],
            "exclude": "layers.1",
            "kind": "forward",
            "action": "record",
            "steps": [0, 9],
            "tensors": True,
            "samples": 4,
            "slice": "0:4, ::2",
            "dtype": "float16",
        },
        "tame": {"layers": "**", "params": "weight", "kind": "parameter_grad", "action": "clip", "norm": 1.0},
        "half": {
            "layers": "layers.*",
            "kind": "full_backward",
            "action": "scale",
            "factor": 0.5,
            "start": 2,
            "stop": 8,
        },
        "noisy": {"layers": "layers.0", "kind": "forward", "action": "modify", "fn": "noise", "std": 0.05},
        "steps": {"layers": "**", "kind": "step_post", "role": "update", "action": "record"},
        "tests": {"layers": ".", "kind": "forward", "action": "record", "phase": "eval"},
    },
    "sink": {"tensors": "list", "when_full": "wait", "durability": "process", "on_error": "stop"},
}

# A target can run any code (docs/security.md), so these targets are chosen to be harmless.
TARGETS = [
    "",
    "nowhere.Thing",
    "torch.nn",
    "torch.nn.Linear",
    "math.pi",
    "builtins.int",
    "a..b",
    ".",
    "instrument",
    "é.ü",
]
TEXTS = [
    "", " ", "null", "**", "*.*", "[", "[]", "re:(", "re:.*", "re:(a+)+$", "../..", "/etc/passwd", "a" * 5000, "\x00", "\n",
    "😀", "layers.0", "layres.0", "{x}", "${oc.env:HOME}", "%s", "0:0", ":::", "1e400", "nan", "true", "-1", "<script>", "'; --",
]  # fmt: skip
NUMBERS = [
    *(0, 1, -1, 2, 7, 10**6, 10**9, 10**18, 2**63, -(10**12)),
    *(0.0, -0.5, 0.5, 1e-300, 1e300, math.inf, -math.inf, math.nan),
]
WORDS = [
    "**", "layers.*", "layers.0.**", "layers.1.0", ".", "re:layers", "forward", "forward_pre", "tensor", "full_backward",
    "parameter_grad", "step_post", "loss", "record", "clip", "scale", "modify", "output", "input", "param", "zero", "sign",
    "train", "test", "eval", "mean", "l1", "float32", "bfloat16", "0", "...", ":", "::-1", "bytes", "drop", "auto",
]  # fmt: skip
OTHERS = [None, True, False, [], {}, [[]], [None], {"a": 1}, [1, "two", None], {"_target_": "builtins.dict"}]
KEYS = [
    *("layers", "kind", "action", "every", "fn", "stats", "norm", "_target_"),
    *("unknown", "", "lyers", "0", "role", "path", "phase"),
]


def mutated(number: int) -> dict[str, Any]:
    """Return `CONFIG` with one, two or four random changes, which depend on the number."""
    draw = random.Random(number)
    config = copy.deepcopy(CONFIG)
    for _ in range(draw.choice([1, 1, 1, 2, 2, 4])):
        _change(config, draw)
    return config


def _change(config: dict[str, Any], draw: random.Random) -> None:
    holder, key = draw.choice(list(_entries(config)))
    match draw.randrange(16):
        case 0:
            del holder[key]
        case 1 if isinstance(holder, dict):
            holder[draw.choice(KEYS)] = _value(draw, key)
        case 2:
            other, there = draw.choice(list(_entries(config)))
            holder[key] = copy.deepcopy(other[there])
        case 3:
            holder[key] = [holder[key]] * draw.choice([1, 2, 50])
        case 4:
            holder[key] = {draw.choice(KEYS): holder[key]}
        case 5:
            deep: Any = holder[key]
            for _ in range(draw.choice([3, 60])):
                deep = {"a": deep} if draw.random() < 0.5 else [deep]
            holder[key] = deep
        case _:
            holder[key] = _value(draw, key, holder[key])


def _value(draw: random.Random, key: Any, before: Any = None) -> Any:
    """Return a random value for a key, often of the type of the value before and of a plausible size."""
    if key == "_target_":
        return draw.choice([*TARGETS, *OTHERS])
    if draw.random() < 0.6:
        if isinstance(before, bool):
            return not before
        if isinstance(before, int):
            return max(0, before + draw.choice([-3, -1, 1, 2, 5, 50]))
        if isinstance(before, float):
            return before * draw.choice([0.0, -1.0, 0.1, 10.0])
        if isinstance(before, str):
            return draw.choice(WORDS)
    return copy.deepcopy(draw.choice(draw.choice([TEXTS, NUMBERS, OTHERS])))


def _entries(value: Any) -> Any:
    """Yield every container in a nested value with each of its keys or indices, as (container, key)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _entries(value[key])


VALID = (
    *("seed=7", "train.steps=3", "train.batch_size=8", "optimizer.lr=0.01"),
    *("hooks.activations.every=2", "hooks.activations.stats=[mean]"),
    "+hooks.new={layers: '**', kind: tensor, action: record}",
)
"""Overrides that are valid with the command of the fuzz tests, so that some command lines are accepted."""


def mutated_arguments(number: int) -> list[str]:
    """Return one to three random overrides, valid and invalid, which depend on the number."""
    draw = random.Random(number)
    paths = [".".join(map(str, path)) for path in _paths(CONFIG)]
    arguments = []
    for _ in range(draw.choice([1, 2, 3])):
        if draw.random() < 0.35:
            arguments.append(draw.choice(VALID))
            continue
        key = draw.choice([*paths, *KEYS, "hooks.new", "hydra.run.dir", "exp"])
        odd = ["[1,2", "{a: 1}", "[]", "{", "a=b", "1,2", "range(1,3)", "glob(*)"]
        value = draw.choice([*TEXTS, *map(str, NUMBERS), *odd])
        if not value.isprintable() or "/" in value or (key.startswith("hydra") and draw.random() < 0.9):
            value = "x"
        arguments.append(f"{draw.choice(['', '', '+', '++', '~'])}{key}{draw.choice(['=', '=', '='])}{value}")
    return arguments


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Any:
    for key in value if isinstance(value, dict) else ():
        yield (*path, key)
        yield from _paths(value[key], (*path, key))
