"""Cost of a single firing: extra time per recorded tensor of small layers, in microseconds.

python benchmarks/firing.py [--rounds N] [--threads 1 2] [--layers 32]

The network is 32 x Linear(64, 64) with a batch of 32 samples. Bare steps and steps with hooks alternate in one process. A
figure is the median of the differences of all rounds, divided by the number of recorded tensors in a step.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from measure import keep_memory, machine
from torch import Tensor, nn

import instrument
from instrument.stats.cpu_kernel import make_slab
from instrument.stats.sums import COLUMNS

WIDTH, BATCH = 64, 32
HOOKS = 5  # on each layer, for the growth with the number of layers
PAIRS = 6  # of trainings with and without rules
WARM_UP = 250  # steps in which rules learn the usual values, and relations are checked
RECORD: dict[str, Any] = {"layers": "*", "kind": "forward", "action": "record"}
GRADIENT: dict[str, Any] = {"layers": "*", "kind": "full_backward", "role": "grad_output", "action": "record"}
NEVER = {"start": 10**9}
NEVER_AT_ROOT: dict[str, Any] = {**RECORD, "layers": ".", **NEVER}
NOT_SCHEDULED = "instrument: not scheduled, per module call, without the end of the step"
Step = Callable[[], object]
Open = Callable[["Training"], AbstractContextManager[Step]]


class Training:
    """Training steps of a chain of linear layers."""

    def __init__(self, layers: int) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        self.batch = torch.randn(BATCH, WIDTH)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)

    def step(self) -> Tensor:
        loss: Tensor = self.model(self.batch).square().mean()
        self.optimizer.zero_grad(set_to_none=False)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.detach()


@contextmanager
def with_instrument(
    training: Training, specs: dict[str, dict[str, Any]], rules: Literal["default"] | None = "default"
) -> Iterator[Step]:
    """Yield a step with hooks whose rows are written to Parquet."""
    with (
        tempfile.TemporaryDirectory() as folder,
        instrument.attach(
            training.model, specs, optimizer=training.optimizer, out=Path(folder) / "run", rules=rules
        ) as probe,
    ):

        def step() -> None:
            probe.end_step(loss=training.step())

        yield step


@contextmanager
def with_callback(training: Training, callback: Callable[[Tensor], object], *, gradients: bool) -> Iterator[Step]:
    """Yield a step with a plain forward hook on each layer, and with a tensor hook on its output if requested."""

    def hook(module: nn.Module, args: object, output: Tensor) -> object:  # noqa: ARG001
        if gradients:
            output.register_hook(lambda gradient: callback(gradient) and None)
        return callback(output)

    handles = [layer.register_forward_hook(hook) for layer in training.model]
    try:
        yield lambda: training.step().item()
    finally:
        for handle in handles:
            handle.remove()


def naive(rows: list[tuple[float, ...]]) -> Callable[[Tensor], None]:
    """Return a function that appends eight statistics of a tensor to a list, as a hook in a notebook does."""

    def callback(tensor: Tensor) -> None:
        x = tensor.detach()
        rows.append(
            tuple(
                value.item()
                for value in (
                    x.mean(), x.std(), x.min(), x.max(), x.norm(), (x == 0).sum(), x.isnan().sum(), x.isinf().sum()
                )
            )
        )  # fmt: skip

    return callback


@contextmanager
def with_nvdlfw_inspect(training: Training, folder: Path, *, gradients: bool) -> Iterator[Step]:
    """Yield a step with the statistics of nvdlfw-inspect in a text log."""
    import nvdlfw_inspect.api as debug_api

    config = folder / "inspect.yaml"
    config.write_text(
        'all: {enabled: true, layers: {layer_name_regex_pattern: ".*"}, base: {LogTensorStats: {enabled: true, '
        "tensors: [output], stats: [min, max, mean, std, l1_norm, l2_norm], freq: 1}}}"
    )
    debug_api.initialize(config_file=str(config), log_dir=str(folder), default_logging_enabled=True)

    def callback(tensor: Tensor) -> None:
        debug_api.log_tensor_stats("layer", tensor_name="output", tensor=tensor.detach(), skip_reduction=True)

    try:
        with with_callback(training, callback, gradients=gradients) as step:
            yield lambda: (step(), debug_api.step())
    finally:
        debug_api.end_debug()


def extra_microseconds(bare: Step, hooked: Step, *, rounds: int, steps: int) -> tuple[float, float]:
    """Return the median extra duration of a step with hooks, and the median duration of a bare step, in microseconds."""
    differences, durations = [], []
    for number in range(rounds + 2):
        times = {}
        for name in ("bare", "hooked") if number % 2 else ("hooked", "bare"):
            step, start = {"bare": bare, "hooked": hooked}[name], time.perf_counter()
            for _ in range(steps):
                step()
            times[name] = (time.perf_counter() - start) / steps * 1e6
        if number >= 2:  # the first two rounds are warm-up
            differences.append(times["hooked"] - times["bare"])
            durations.append(times["bare"])
    return statistics.median(differences), statistics.median(durations)


def growth(layers: int, *, rounds: int, steps: int) -> tuple[float, float]:
    """Return the extra time per tensor, and the time of `end_step` per row, of five hooks on each of many layers.

    Both are medians in microseconds.
    """
    bare, hooked, ends = Training(layers), Training(layers), []
    specs = {f"outputs_{i}": RECORD for i in range(HOOKS)}
    with (
        tempfile.TemporaryDirectory() as folder,
        instrument.attach(hooked.model, specs, optimizer=hooked.optimizer, out=Path(folder) / "run") as probe,
    ):

        def step() -> None:
            loss = hooked.step()
            start = time.perf_counter()
            probe.end_step(loss=loss)
            ends.append((time.perf_counter() - start) * 1e6)

        extra, _ = extra_microseconds(lambda: bare.step().item(), step, rounds=rounds, steps=steps)
    return extra / (HOOKS * layers), statistics.median(ends) / (HOOKS * layers)


def cost_of_rules(layers: int, *, rounds: int, steps: int) -> tuple[float, float]:
    """Return the extra time per step of the default rules, and of the hooks without rules, in microseconds.

    They are means over pairs of trainings: trainings of one kind differ by some microseconds, since their objects are elsewhere in memory.
    """
    bare, costs = Training(layers), []
    for _ in range(PAIRS):
        with (
            with_instrument(Training(layers), {"outputs": RECORD}, rules=None) as hooked,
            with_instrument(Training(layers), {"outputs": RECORD}) as judged,
        ):
            for _ in range(WARM_UP):
                hooked()
                judged()
            rules, _ = extra_microseconds(hooked, judged, rounds=rounds // 2, steps=steps)
            hooks, _ = extra_microseconds(lambda: bare.step().item(), hooked, rounds=rounds // 2, steps=steps)
        costs.append((rules, hooks))
    of_rules, of_hooks = zip(*costs, strict=True)
    return statistics.mean(of_rules), statistics.mean(of_hooks)


def cost_of_fingerprint(dtype: torch.dtype, elements: int, rounds: int) -> tuple[float, float]:
    """Return the duration of the kernel for the default statistics of a tensor, in microseconds, and its ratio with the fingerprint.

    Both are the medians of all rounds, in which the calls alternate.
    """
    tensor, slab = torch.randn(elements).to(dtype), make_slab(len(COLUMNS))
    calls = max(1, 100_000 // elements)
    durations, ratios = [], []
    for _ in range(rounds * max(1, min(10, 1_000_000 // elements))):
        times = []
        for further in (0, 2):
            start = time.perf_counter()
            for _ in range(calls):
                slab.add(tensor, 0, None, further)
            times.append((time.perf_counter() - start) / calls * 1e6)
        slab.take()
        durations.append(times[0])
        ratios.append(times[1] / times[0])
    return statistics.median(durations), statistics.median(ratios)


def cost_of_recorded_fingerprint(dtype: torch.dtype, elements: int, rounds: int) -> float:
    """Return the ratio of a step that records a tensor at 8 layers, with the end of the step, with fingerprints to the one without.

    It is the median of all rounds, in which calls with and without fingerprints alternate.
    """
    tensor, calls, ratios = torch.randn(elements).to(dtype), max(2, min(40, 100_000 // elements)), []
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        sides = []
        for stats in (["default"], ["default", "fingerprint"]):
            model = nn.Sequential(*(nn.Identity() for _ in range(8)))
            hooks = {"outputs": {**RECORD, "stats": stats}}
            sides.append((model, stack.enter_context(instrument.attach(model, hooks, out=f"{name}/{len(sides)}"))))
        for number in range(rounds + 3):
            times = {}
            for index, (model, probe) in [*enumerate(sides)][:: -1 if number % 2 else 1]:
                start = time.process_time()
                for _ in range(calls):
                    model(tensor)
                    probe.end_step()
                times[index] = time.process_time() - start
            ratios.append(times[1] / times[0])
    return statistics.median(ratios[3:])  # the first rounds prepare the hooks


def variants(layers: int, folder: Path) -> Iterator[tuple[str, int, Open]]:
    """Yield the label of each row, the number of tensors by which its time is divided, and the function that opens it."""

    def hooks(**specs: dict[str, Any]) -> Open:
        return lambda training: with_instrument(training, specs)

    def callback(make: Callable[[], Callable[[Tensor], object]], gradients: bool) -> Open:
        return lambda training: with_callback(training, make(), gradients=gradients)

    yield "instrument: outputs", layers, hooks(outputs=RECORD)
    yield "instrument: outputs and their gradients", 2 * layers, hooks(outputs=RECORD, gradients=GRADIENT)
    yield (
        "instrument: outputs, with fingerprints",
        layers,
        hooks(outputs={**RECORD, "stats": ["default", "fingerprint"]}),
    )
    yield "instrument: the end of a step without rows, per step", 1, hooks(root=NEVER_AT_ROOT)
    yield NOT_SCHEDULED, layers, hooks(outputs={**RECORD, **NEVER}, gradients={**GRADIENT, **NEVER})
    clip = {"layers": "*", "kind": "forward", "action": "clip", "min": -1.0, "max": 1.0}
    yield "instrument: clip by value", layers, hooks(clip=clip)
    when = {"stat": "l2", "above": 1.0, "times": "median"}
    yield "instrument: clip by value, where a condition holds", layers, hooks(clip={**clip, "when": when})
    tensors = {**RECORD, "stats": "none", "tensors": True}
    yield "instrument: tensors of the outputs, written", layers, hooks(tensors=tensors)
    yield "instrument: tensors of the outputs, kept for 5 steps", layers, hooks(tensors={**tensors, "keep": 5})
    scale = {"layers": "*", "kind": "forward", "action": "scale", "factor": 0.9}
    yield "instrument: scale", layers, hooks(scale=scale)
    for kind in ("tensor", "full_backward_pre"):
        yield f"instrument: clip of gradients by value, {kind}", layers, hooks(clip={**clip, "kind": kind})
        yield f"instrument: scale of gradients, {kind}", layers, hooks(scale={**scale, "kind": kind})
    for gradients, label, count in ((False, "outputs", layers), (True, "outputs and their gradients", 2 * layers)):
        yield f"naive hook: {label}", count, callback(lambda: naive([]), gradients)
        yield f"empty hook: {label}", count, callback(lambda: lambda _: None, gradients)
    yield "hook that only clips by value", layers, callback(lambda: lambda output: output.clamp(-1.0, 1.0), False)
    yield "hook that only scales", layers, callback(lambda: lambda output: output * 0.9, False)
    try:
        import nvdlfw_inspect  # noqa: F401
    except ImportError:
        return
    for gradients, label, count in ((False, "outputs", layers), (True, "outputs and their gradients", 2 * layers)):
        yield (
            f"nvdlfw-inspect: {label}",
            count,
            lambda training, gradients=gradients: with_nvdlfw_inspect(training, folder, gradients=gradients),  # type: ignore[misc]
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 2])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    keep_memory()
    print(machine())
    table: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for threads in options.threads:
            torch.set_num_threads(threads)
            for label, tensors, open_step in variants(options.layers, Path(folder)):
                if options.only not in label:
                    continue
                bare, hooked = Training(options.layers), Training(options.layers)
                with ExitStack() as stack:
                    baseline: Step = lambda bare=bare: bare.step().item()  # noqa: E731
                    if label == NOT_SCHEDULED:
                        baseline = stack.enter_context(with_instrument(bare, {"root": NEVER_AT_ROOT}))
                    step = stack.enter_context(open_step(hooked))
                    extra, duration = extra_microseconds(baseline, step, rounds=options.rounds, steps=options.steps)
                table.setdefault(label, []).append(f"{extra / tensors:.1f}")
                print(
                    f"{threads} threads: {label}: {extra / tensors:.1f} us  (bare step {duration / 1e3:.2f} ms)",
                    flush=True,
                )
    print("\n| microseconds per tensor | " + " | ".join(f"{threads} threads" for threads in options.threads) + " |")
    print("|---|" + "---|" * len(options.threads))
    for label, cells in table.items():
        print(f"| {label} | " + " | ".join(cells) + " |")
    if options.only:
        return
    torch.set_num_threads(1)
    print(
        "\n| dtype | elements | kernel for default statistics, microseconds | with fingerprint | recorded |\n|---|---|---|---|---|"
    )
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        for elements in (1 << 12, 1 << 18, 1_000_000, 10_000_000):
            duration, ratio = cost_of_fingerprint(dtype, elements, options.rounds)
            recorded = cost_of_recorded_fingerprint(dtype, elements, 3 * options.rounds)
            print(f"| {dtype} | {elements:,} | {duration:.1f} | {ratio:.2f} | {recorded:.2f} |", flush=True)
    print(f"\n| layers, {HOOKS} hooks each | microseconds per tensor | of these in end_step, per row |\n|---|---|---|")
    for layers in (20, 50, 100, 200):
        extra, end = growth(layers, rounds=options.rounds, steps=options.steps)
        print(f"| {layers} | {extra:.1f} | {end:.1f} |", flush=True)
    print("\n| recorded tensors | default rules, microseconds per step | of the cost of the hooks |\n|---|---|---|")
    for layers in (2, 8, 32, 128):
        rules, hooks = cost_of_rules(layers, rounds=options.rounds, steps=options.steps)
        print(f"| {layers} | {rules:.0f} | {rules / hooks:.1%} |", flush=True)


if __name__ == "__main__":
    main()
