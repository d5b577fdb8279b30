"""Steps on a GPU with hooks: their time relative to the same step without hooks, kernels, copies, waits and memory.

python benchmarks/gpu.py [--rounds N] [--only resnet50 gpt2_small llama_300m] [--precision fp32 bf16]
    [--modes eager compiled] [--rows TEXT ...]
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import Ratio, machine, paired
from steps import jobs
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from workloads import GPU_WORKLOADS, Training, Workload

import instrument
from instrument.stats.device_choice import measured_by

DEVICE = "cuda"  # also the name of ROCm devices
PRECISIONS = {"fp32": None, "bf16": torch.bfloat16}
SYNCHRONIZATIONS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
NAIVE = "every leaf's output and gradient, with naive asynchronous hooks"
MSPROBE = "every module's inputs, outputs and gradients, with msprobe"
MODES = ("eager", "compiled")
# The models and rows that are compiled, in bf16. Compiling takes most of their time.
COMPILED = ("gpt2_small",)
COMPILED_ROWS = ("hooks attached, none scheduled", "every leaf's output and gradient, every step")
Step = Callable[[], object]
STEPS = 3  # of a round
COPIED_TENSORS, COPIED_BYTES = 4, 32 * 2**20  # in each step of `measure_copies`


class Counts(NamedTuple):
    """What the profiler counted, per step.

    Attributes:
        kernels: Kernels that ran on the device.
        copies: Copies between the device and the host.
        waits: Calls in which the host waits for the device. On ROCm, their names begin with `hip`.
    """

    kernels: float
    copies: float
    waits: float


def counted(step: Step, steps: int) -> Counts:
    """Profile some steps."""
    # Without `ProfilerActivity.CPU`, which takes seconds for each step. The calls of the CUDA runtime are part of this activity.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
    kernels = copies = waits = 0
    for event in profiler.events():
        if event.device_type == DeviceType.CUDA:
            copies += event.name.startswith(("Memcpy HtoD", "Memcpy DtoH"))
            kernels += not event.is_user_annotation and not event.name.startswith(("Memcpy", "Memset"))
        else:
            waits += event.name.replace("hip", "cuda") in SYNCHRONIZATIONS
    return Counts(kernels / steps, copies / steps, waits / steps)


def measure_copies() -> tuple[float, float]:
    """Measure the copies of recorded tensors to the host.

    Returns:
        The speed of the copies that the recorder makes, and that of a copy to pinned memory, in GiB/s.
    """
    shape = (COPIED_BYTES // 4,)
    model = torch.nn.Sequential(*(torch.nn.ReLU() for _ in range(COPIED_TENSORS)))
    hook = {"layers": "*", "kind": "forward", "action": "record", "stats": [], "tensors": True}
    source, pinned = torch.randn(shape, device=DEVICE), torch.empty(shape, pin_memory=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        instrument.attach(model, {"outputs": hook}, out=Path(folder) / "run") as probe,
    ):

        def record() -> None:
            model(source)
            torch.cuda.synchronize()
            probe.end_step()

        return copy_speed(record), copy_speed(lambda: pinned.copy_(source, non_blocking=True))


def copy_speed(step: Step) -> float:
    """Return the speed of the large copies to the host of some steps, in GiB/s."""
    step()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    copies = [event for event in profiler.events() if event.name.startswith("Memcpy DtoH")]
    durations = [event.time_range.elapsed_us() for event in copies if event.time_range.elapsed_us() > 100]
    return len(durations) * COPIED_BYTES / 2**30 / (1e-6 * sum(durations))


@contextmanager
def hooked_step(training: Training, specs: dict[str, dict[str, Any]]) -> Iterator[Step]:
    """Yield a function that makes a training step with hooks that write to Parquet."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        with instrument.attach(training.model, specs, optimizer=training.optimizer, out=out) as probe:
            yield lambda: probe.end_step(loss=training.step())


@contextmanager
def naive_step(training: Training) -> Iterator[Step]:
    """Yield a function that makes a training step with naive hooks: eight operations for each leaf's output and gradient.

    The statistics are copied to pinned memory asynchronously, and read a step later.
    """
    rows: list[torch.Tensor] = []

    def measure(tensor: torch.Tensor) -> None:
        x = tensor.detach().float()
        numbers = (x.mean(), x.std(), x.min(), x.max(), x.norm(), (x == 0).sum(), x.isnan().sum(), x.isinf().sum())
        rows.append(torch.stack(numbers))

    def on_output(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG001
        measure(output)
        if output.requires_grad:
            output.register_hook(measure)

    handles = [training.model.get_submodule(name).register_forward_hook(on_output) for name in training.leaves()]
    copied: list[tuple[torch.Tensor, torch.cuda.Event]] = []

    def step() -> None:
        training.step()
        memory = torch.empty((len(rows), 8), pin_memory=True).copy_(torch.stack(rows), non_blocking=True)
        rows.clear()
        copied.append((memory, torch.cuda.Event()))
        copied[-1][1].record()
        if len(copied) > 1:
            numbers, event = copied.pop(0)
            event.synchronize()
            numbers.tolist()

    try:
        yield step
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def msprobe_step(training: Training) -> Iterator[Step]:
    """Yield a function that makes a training step while msprobe records statistics of all modules, copied asynchronously."""
    from msprobe.pytorch import PrecisionDebugger

    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        data = {"scope": [], "list": [], "data_mode": ["forward", "backward"], "summary_mode": "statistics"}
        job = {"task": "statistics", "level": "L0", "rank": [], "step": [], "dump_path": folder, "async_dump": True}
        config.write_text(json.dumps({**job, "statistics": data}))
        debugger = PrecisionDebugger(config_path=str(config))

        def step() -> None:
            debugger.start(model=training.model)
            training.step()
            debugger.stop()
            debugger.step()

        yield step


class Row(NamedTuple):
    """The cost of hooks.

    Attributes:
        time: Duration of a step relative to that without hooks.
        counts: Counts of a step with hooks.
        memory: Peak memory of the device in a step with hooks, relative to that without hooks.
    """

    time: Ratio
    counts: Counts
    memory: float


class Baseline:
    """A training without hooks.

    Attributes:
        step: Makes a training step.
        memory: The memory of the device that it occupies between steps, in bytes.
        peak: The memory that a step takes in addition, in bytes.
    """

    def __init__(self, create: Callable[[], Training]) -> None:
        before = torch.cuda.memory_allocated()
        self.step = create().step
        self.step()  # the first step of an optimizer has other kernels
        self.memory = torch.cuda.memory_allocated() - before
        self.peak = peak(self.step)


def measure(
    baseline: Baseline,
    training: Training,
    hooked: Callable[[Training], AbstractContextManager[Step]],
    rounds: int,
    steps: int,
) -> Row:
    """Measure a step with hooks and a step without.

    Args:
        baseline: The training without hooks.
        training: The training that gets hooks.
        hooked: Returns a block that yields the step of a training with hooks.
        rounds: The number of rounds.
        steps: The number of steps of a round.
    """
    with hooked(training) as step:
        time = paired(baseline.step, step, rounds=rounds, steps=steps, device=DEVICE)
        counts = counted(step, steps if steps > STEPS else 1)
        return Row(time, counts, (baseline.memory + peak(step)) / (baseline.memory + baseline.peak))


def peak(step: Step) -> int:
    """Return the memory that a step takes in addition to that before it, in bytes."""
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    return torch.cuda.max_memory_allocated() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", nargs="*", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--modes", nargs="*", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--rows",
        nargs="*",
        default=[""],
        help="measure only rows whose label contains one of these texts; default: all",
    )
    parser.add_argument("--only", nargs="*", choices=GPU_WORKLOADS, default=list(GPU_WORKLOADS))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "benchmarks/gpu.py: PyTorch finds no CUDA or ROCm device\n")
    print(machine(), torch.cuda.get_device_name())
    print(
        "\n| model | precision | recorded | time | kernels | copies | waits | memory |\n|---|---|---|---|---|---|---|---|"
    )
    started_at = time.perf_counter()
    for mode, name, precision in product(options.modes, options.only, options.precision):
        if mode == "eager" or (name in COMPILED and precision == "bf16"):
            measure_model(GPU_WORKLOADS[name], precision, options, compiled=mode == "compiled")
    recorded, bus = measure_copies()
    print(f"\nrecorded tensors: copied at {recorded:.1f} GiB/s; a copy to pinned memory: {bus:.1f} GiB/s")
    print("statistics:", measured_by())
    print(f"duration: {time.perf_counter() - started_at:.0f} s")


def measure_model(workload: Workload, precision: str, options: argparse.Namespace, *, compiled: bool) -> None:
    """Print the rows of a model.

    Args:
        workload: The model and its batch.
        precision: A key of `PRECISIONS`.
        options: The options of the command.
        compiled: Whether the model is compiled with `torch.compile(fullgraph=True)`.
    """

    def create() -> Training:
        training = workload.training(DEVICE, PRECISIONS[precision])
        if compiled:
            training.model.compile(fullgraph=True)
        return training

    baseline = Baseline(create)
    ways = {label: partial(hooked_step, specs=specs) for label, specs in jobs(create()).items()}
    if compiled:
        ways = {label: ways[label] for label in COMPILED_ROWS}
    else:
        ways[NAIVE] = naive_step
        if find_spec("msprobe") is not None:
            ways[MSPROBE] = msprobe_step
    seconds = paired(baseline.step, baseline.step, rounds=3, device=DEVICE).baseline
    model = f"{workload.name}, compiled" if compiled else workload.name
    show(model, precision, "no hooks (absolute time)", f"{1e3 * seconds:.1f} ms", counted(baseline.step, 1), 1.0)
    for label, hooked in ways.items():
        if any(part in label for part in options.rows):
            steps = 10 if "every 10 steps" in label else STEPS
            row = measure(baseline, create(), hooked, options.rounds, steps)
            show(model, precision, label, f"{row.time.ratio:.2f}", row.counts, row.memory)


def show(model: str, precision: str, recorded: str, time: str, counts: Counts, memory: float) -> None:
    """Print a row of the table."""
    numbers = " | ".join(f"{number:.1f}" for number in counts)
    print(f"| {model} | {precision} | {recorded} | {time} | {numbers} | {memory:.2f} |", flush=True)


if __name__ == "__main__":
    main()
