"""The quality of the rule `reference`: how many seeded faults leave the ranges of healthy trainings, and how often a healthy one does.

python benchmarks/reference_rules.py                  # the reported seeds
python benchmarks/reference_rules.py --development    # the seeds with which the margin was chosen
python benchmarks/reference_rules.py --only CNN --references 3

The faults are those of `faults.py` whose healthy training has the same layers for each seed. The reference has healthy trainings with
other seeds. A fault is located if the first event is at one of its layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
from faults import FAULTS, STEPS
from measure import machine
from rules import train
from torch.optim import Adam
from trainings import MOMENTUM, Training, Transformer, cnn, digits, gan, gpt_init, mlp, rnn, tokens

from instrument.integrations.attached_probe import AttachedProbe

HEALTHY: dict[str, Callable[[], Training]] = {
    "MLP, SGD": lambda: digits(mlp(), optimizer=MOMENTUM),
    "MLP, four hidden layers": lambda: digits(mlp(hidden=4), optimizer=MOMENTUM),
    "MLP, Adam": lambda: digits(mlp(), optimizer=partial(Adam, lr=1e-3)),
    "CNN": lambda: digits(cnn(), (1, 8, 8), optimizer=MOMENTUM),
    "RNN": lambda: digits(rnn(), (8, 8), optimizer=partial(Adam, lr=3e-3)),
    "transformer": lambda: tokens(gpt_init(Transformer())),
    "transformer, three blocks": lambda: tokens(gpt_init(Transformer(3))),
    "GAN": gan,
}
# By healthy training, the faults, each with the layers at which it is. `{i}` is the number of the layer; empty: no particular layer.
FAULTS_OF: dict[str, dict[str, tuple[str, ...]]] = {
    "MLP, SGD": {
        "frozen layer (learning rate of its group is 0)": ("linear{i}",),
        "input not normalized (0 to 255)": ("linear0",),
        "input with a large mean": ("linear0",),
        "one feature not scaled": ("linear0",),
        **dict.fromkeys(
            (
                "learning rate too high (SGD)", "learning rate too low", "schedule jumps up", "momentum is 1",
                "weight decay too large", "gradients clipped to zero", "gradients are never zeroed", "one class only",
                "all samples of a batch are identical", "data sorted by class", "shuffled labels",
            ),
            (),
        ),
    },
    "MLP, four hidden layers": {"dead ReLU layer": ("linear{i}", "act{i}")},
    "MLP, Adam": {"learning rate too high (Adam)": ()},
    "CNN": {
        "dead ReLU layer": ("conv{i}", "act{i}"),
        "detached features": ("conv*",),
        "input not normalized (0 to 255)": ("conv0",),
        **dict.fromkeys(("learning rate too high", "the same sample in every batch", "class imbalance"), ()),
    },
    "RNN": {
        "optimizer without the recurrent layer": ("rnn",),
        "input not normalized (0 to 255)": ("rnn",),
        **dict.fromkeys(("learning rate too high", "gradients are never zeroed"), ()),
    },
    "transformer": {
        "optimizer without the head": ("head",),
        "dead embedding (all tokens are padding)": ("embedding",),
        **dict.fromkeys(("learning rate too low", "schedule jumps up", "random targets"), ()),
    },
    "GAN": {
        "detached generator": ("generator*",),
        "real data outside the range of the generator": ("discriminator.linear0",),
        "learning rate too high": (),
    },
}  # fmt: skip
DEVELOPMENT_SEEDS, REPORTED_SEEDS = 0, 100  # the first ones


def first_event(probe: AttachedProbe) -> tuple[str, str] | None:
    """Return the layer and the message of the first event of the rule; None without one."""
    events = probe.run.events
    fired = events[events["rule"] == "healthy"]
    return None if fired.empty else (fired["layer"].iloc[0], fired["message"].iloc[0])


def run(
    make: Callable[[], Training | tuple[Training, str]], seed: int, file: Path
) -> tuple[str, tuple[str, str] | None]:
    """Run a training with a reference. Return the layer of its fault, and the first event."""
    torch.manual_seed(seed)
    made = make()
    training, layer = made if isinstance(made, tuple) else (made, "")
    probe, _ = train(training, STEPS, rules={"healthy": {"rule": "reference", "from": file}})
    return layer, first_event(probe)


def reference(name: str, seeds: Sequence[int], folder: Path) -> Path:
    """Make the reference of a healthy training."""
    from instrument import make_reference

    for seed in seeds:
        torch.manual_seed(seed)
        train(HEALTHY[name](), STEPS, rules=None, out=folder / name / str(seed))
    file = folder / f"{name}.parquet"
    make_reference(folder / name, out=file)
    return file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--development", action="store_true", help="the seeds with which the margin was chosen")
    parser.add_argument("--references", type=int, default=5, help="the number of healthy trainings in a reference")
    parser.add_argument("--only", default="", help="only healthy trainings whose name contains this text")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    first = DEVELOPMENT_SEEDS if arguments.development else REPORTED_SEEDS
    print(f"{machine()}\nseeds from {first}; {STEPS} steps; {arguments.references} healthy trainings in a reference\n")
    print("| training | fault | found | at its layer | first event |\n|---|---|---|---|---|")
    alarms = healthy = found = faults = located = local = 0
    with TemporaryDirectory() as folder:
        for name, make_healthy in HEALTHY.items():
            if arguments.only not in name:
                continue
            file = reference(name, range(first, first + arguments.references), Path(folder))
            for seed in range(first + 10, first + 13):
                _, event = run(make_healthy, seed, file)
                healthy, alarms = healthy + 1, alarms + (event is not None)
                if event is not None:
                    print(f"| {name} | none, seed {seed} | false | | {event[1]} |", flush=True)
            for fault, layers in FAULTS_OF.get(name, {}).items():
                (case,) = (each for each in FAULTS if (each.architecture, each.name) == (name.split(",")[0], fault))
                for seed in range(first + 20, first + 22):
                    layer, event = run(partial(case.make, Random(f"{name} {fault} {seed}")), seed, file)
                    patterns = [pattern.replace("{i}", layer[-1:]) for pattern in layers]
                    is_there = event is not None and any(fnmatchcase(event[0], pattern) for pattern in patterns)
                    faults, found = faults + 1, found + (event is not None)
                    local, located = local + bool(layers), located + is_there
                    text = "" if event is None else event[1]
                    print(
                        f"| {name} | {fault} | {event is not None} | {is_there if layers else ''} | {text} |",
                        flush=True,
                    )
    print(f"\nFaults: {found} of {faults} found; {located} of {local} located at first")
    print(f"Healthy trainings with a warning: {alarms} of {healthy}")


if __name__ == "__main__":
    main()
