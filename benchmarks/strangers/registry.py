"""The registry of the programs, and the hooks and rules with which each of them runs.

A program is a function that trains a model in a plain loop. Its faults are variants of it: the same function, called with the name of
the fault. The healthy twin of a fault is the function without that name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn

import instrument
from instrument.config.rules import default_rules
from instrument.integrations.attached_probe import AttachedProbe
from instrument.plan.modules import Layers
from instrument.probe import coverage
from instrument.probe.program_settings import module_settings

HOOK_SETS = ("inputs", "activations", "gradients", "parameters", "dead_relu", "transformer", "moe")
EVERY = 10  # the hook sets record one step of ten
WITHIN = 20  # recorded steps after the start of its effect in which a fault must be found
GROUPS = ("healthy", "silent errors", "transformers", "keras", "general")
# Names in diagnoses for which the package had no rule when the programs were written.
MISSING_RULES = frozenset(
    {
        "accumulation_divides",
        "autocast_in_effect",
        "batch_too_small",
        "data_changed_in_place",
        "distinct_data",
        "edges_of_other_graphs",
        "ends_bootstrapped",
        "gradients_zeroed",
        "heavy_tailed_input",
        "input_drift",
        "labels_in_the_inputs",
        "labels_of_other_positions",
        "labels_shifted",
        "looks_ahead",
        "loss_broadcasts",
        "loss_scale",
        "low_precision_inputs",
        "missing_activation",
        "missing_labels_in_loss",
        "missing_softmax",
        "mode_of_phase",
        "narrow_layer",
        "padding_attended",
        "padding_in_loss",
        "parameters_follow_gradients",
        "rate_in_effect",
        "replicas_equal",
        "samples_vary",
        "tied_weights",
        "weights_loaded",
        "wrong_axis",
        "wrong_loss",
        "wrong_range_of_loss",
    }
)

# The modules of the programs, by collection. A program and all its faults are in the same one. Rules are developed with the collection
# `build`. The others were written later, without knowledge of the rules: `second` to `twelfth`, whose results have been looked at since,
# and `held out`, which only reports the quality of the rules.
COLLECTIONS = {
    "build": ("healthy", "silent_errors", "transformer_faults", "keras_faults"),
    "second": ("second_healthy", "second_silent_errors", "second_transformer_faults", "second_general_faults"),
    "third": ("third_general", "third_transformers"),
    "fourth": ("fourth_general", "fourth_transformers"),
    "fifth": ("fifth_general", "fifth_transformers"),
    "sixth": ("sixth_general", "sixth_transformers"),
    "seventh": ("seventh_general", "seventh_transformers"),
    "eighth": ("eighth_general", "eighth_transformers"),
    "ninth": ("ninth_general", "ninth_transformers"),
    "tenth": ("tenth_general", "tenth_transformers"),
    "eleventh": ("eleventh_general", "eleventh_transformers"),
    "twelfth": ("twelfth_general", "twelfth_transformers"),
    "held out": ("thirteenth_general", "thirteenth_transformers"),
}

# The parts of a training step in which a fault of each category has its first effect, written before any measurement of this. A fault
# of another category is one of the forward pass.
PARTS: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("labels", "loss", "loss and labels"), ("loss", "backward")),
    **dict.fromkeys(("gradients", "graph"), ("backward", "update")),
    **dict.fromkeys(
        ("frozen parameters", "learning rate", "optimizer", "optimizer and schedule", "schedule"), ("update",)
    ),
    **dict.fromkeys(
        ("optimizer and initialization", "references", "registration", "regularization"), ("forward", "update")
    ),
    **dict.fromkeys(("batch size",), ("forward", "backward")),
    **dict.fromkeys(("precision", "replicas"), ("forward", "backward", "update")),
}

Loss = float | Tensor | None


@dataclass(frozen=True)
class Fault:
    """A variant of a program with an error that raises no exception.

    Attributes:
        name: The name.
        category: What the error concerns.
        source: The collection of faults after which it was written: title and year.
        causes: The rules whose warning is a correct diagnosis; `rule@pattern` if the warning must be at a matching layer,
            and `@pattern` for all rules at a matching layer.
        since: The first step in which the error has an effect.
    """

    name: str
    category: str
    source: str
    causes: tuple[str, ...]
    since: int = 0


@dataclass(frozen=True)
class Program:
    """A healthy program, the twin of its faults.

    Attributes:
        name: The name.
        collection: The collection to which the program and its faults belong; a key of `COLLECTIONS`.
        group: One of `GROUPS`.
        source: The published program after which it was written.
        train: Trains with the fault of a name, or without one. It returns a final loss that is computed in the same way in all
            variants, or None if that is the mean of the last training losses.
        faults: Its faults.
    """

    name: str
    collection: str
    group: str
    source: str
    train: Callable[[str], Loss]
    faults: tuple[Fault, ...] = ()


@dataclass
class Recording:
    """What the runs of this process recorded.

    Attributes:
        rules: The rules: the default ones, rules in addition to them, or None for none.
        out: The folder of the run; None for none.
        events: The warnings of rules: rule, layer, step and message.
        findings: The findings of rules: rule, layer, step and advice.
        losses: The training losses of the process that is measured.
    """

    rules: Mapping[str, Any] | Literal["default"] | None = "default"
    out: Path | None = None
    events: list[dict[str, Any]] = field(default_factory=list)
    findings: list[dict[str, Any]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)


PROGRAMS: dict[str, Program] = {}
RECORDING = Recording()


def program(group: str, source: str, *faults: Fault) -> Callable[[Callable[..., Loss]], Callable[..., Loss]]:
    """Register a function as a program. A function without faults has no argument.

    Args:
        group: One of `GROUPS`.
        source: The published program after which it was written.
        faults: Its faults.
    """

    def register(train: Callable[..., Loss]) -> Callable[..., Loss]:
        name = train.__name__
        collection = next(key for key, modules in COLLECTIONS.items() if train.__module__ in modules)
        PROGRAMS[name] = Program(name, collection, group, source, train if faults else lambda _: train(), faults)
        return train

    return register


def hooks(model: nn.Module) -> dict[str, Any]:
    """Return the hook specs of the packaged sets, without those of which the model has no layers."""
    folder = Path(__file__).parents[2] / "conf" / "hooks"
    specs = [yaml.safe_load((folder / f"{name}.yaml").read_text()) for name in HOOK_SETS]
    types = {type(module).__name__ for module in model.modules()}
    found = {n: spec for each in specs for n, spec in each.items() if not types.isdisjoint(spec.get("types", types))}
    found = {n: {**spec, "optional": True} if "structure" in spec else spec for n, spec in found.items()}
    if not any(hasattr(module, name) for module in model.modules() for name in ("top_k", "num_experts_per_tok")):
        found.pop("load")  # the number of experts per token is unknown
    return found


@contextmanager
def attach(model: nn.Module, optimizer: Any, **options: Any) -> Iterator[AttachedProbe]:
    """Attach the packaged hook sets with the default rules, and add the results to `RECORDING` at the end.

    Attributes of the classes of the programs are no settings, since the name of the fault is among them.

    Args:
        model: The model.
        optimizer: Its optimizers.
        options: Further arguments of `instrument.attach`.
    """
    options |= {"rules": RECORDING.rules, "out": RECORDING.out}
    own_settings = patch.object(coverage, "module_settings", _settings_of_libraries)
    with own_settings, instrument.attach(model, hooks(model), optimizer=optimizer, **options) as probe:
        yield probe
    events, rules = probe.run.events, {*default_rules(), "reference"}
    if RECORDING.rules is not None:
        for event in events[events.severity == "warning"].itertuples():
            if event.rule in rules:
                layer = event.layer if isinstance(event.layer, str) else None
                RECORDING.events.append(
                    {"rule": event.rule, "layer": layer, "step": int(event.step), "message": event.message}
                )
        found = probe.run.findings
        found = found.loc[found["rule"].isin(rules), ["rule", "layer", "step", "advice"]].astype(object)
        RECORDING.findings.extend(found.where(found.notna(), None).to_dict("records"))
    metrics = probe.run.metrics
    RECORDING.losses.extend(metrics.loss[metrics.phase == "train"].astype(float))


def _settings_of_libraries(layers: Layers, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, dict[str, str]]:
    settings = module_settings(layers, optimizers)
    modules = {module for names in COLLECTIONS.values() for module in names}
    for layer in layers:
        if type(layer.module).__module__ in modules:
            settings[layer.name] = {k: text for k, text in settings[layer.name].items() if k not in vars(layer.module)}
    return settings


def in_two_processes(worker: Callable[..., None], *arguments: Any) -> None:
    """Call a function in two processes with a gloo process group, and collect what both recorded.

    The losses are those of rank 0.

    Args:
        worker: The function; its first argument is the rank.
        arguments: Its further arguments.
    """
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        processes = [
            context.Process(target=_run_rank, args=(rank, folder, pipes[rank][1], worker, arguments))
            for rank in range(2)
        ]
        for process in processes:
            process.start()
        for _, writer in pipes:
            writer.close()
        recordings: list[Mapping[str, Any]] = [reader.recv() for reader, _ in pipes]
        for process in processes:
            process.join()
    RECORDING.losses.extend(recordings[0]["losses"])
    for recording in recordings:
        RECORDING.events.extend(event for event in recording["events"] if event not in RECORDING.events)
        RECORDING.findings.extend(recording["findings"])


def _run_rank(rank: int, folder: str, writer: Any, worker: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    worker(rank, *arguments)
    writer.send({name: getattr(RECORDING, name) for name in ("events", "findings", "losses")})
    dist.barrier()
    dist.destroy_process_group()


def seed_of(text: str, seed: int) -> None:
    """Seed the random numbers of PyTorch, for a program and a seed."""
    torch.manual_seed(sum(text.encode()) * 1000 + seed)
