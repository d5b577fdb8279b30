"""Entry point for custom training loops: `attach`."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from numbers import Integral
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, Literal

import torch.distributed as dist
from torch import nn
from torch.amp.grad_scaler import GradScaler

from ..analysis.tensors_of_earlier_runs import RunArchive
from ..config.experiment import BudgetConfig, SinkConfig
from ..config.hook_specs import HookSpec
from ..config.parallel import Declared
from ..config.parse import parse_budget, parse_placement
from ..config.spec_file import Specs, read_rules, read_specs
from ..errors import ConfigError, InstrumentWarning, Problem, raise_problems
from ..hooks.distributed_scope import Parallel, wrappers_of
from ..plan.hook_plan import make_plan
from ..plan.tensor_checks import check_function_names, check_parameters
from ..probe.collectives import Ranks
from ..probe.optimizer_checks import Optimizers
from ..relations.exchange import has_processes
from ..relations.replicas_equal import keeps_all_equal
from ..rules.requirements import check_references, check_rules
from ..runtime.deferred_interrupts import signal_safe_contextmanager, uninterrupted
from ..stats.cpu_kernel import KERNEL
from ..stats.device_choice import measured_by
from ..storage.memory import MemorySink
from ..storage.parquet import ParquetSink
from ..storage.remote_folder import check_is_local
from ..storage.run_folder import RunFolder, WorkerRunFolder
from ..storage.run_record import config_hash
from ..storage.run_upload import RemoteCopy
from ..storage.tee import CustomSink, TeeSink
from ..tables.sink_interface import Sink
from ..training.compiler import prepare_compiled, reported_graph_breaks
from ..training.distributed.process_group import report_dead_ranks
from ..training.distributed.strategies import reduce_problems, shard_problems
from ..values.dtensor import free_gathered_parameters, is_sharded, own_rank
from .attached_probe import AttachedProbe

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@signal_safe_contextmanager
def attach(
    model: nn.Module,
    specs: Specs,
    *,
    optimizer: Optimizers = None,
    scaler: GradScaler | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    sink: Sink | None = None,
    remote: str | None = None,
    seed: int = 0,
    steps_by_loop: bool = False,
    budget: Mapping[str, Any] | None = None,
    reduce: Literal["none", "global"] = "none",
    mesh: DeviceMesh | None = None,
    placement: Mapping[str, Mapping[str, Mapping[str, str]]] | None = None,
    ids: Literal["recorded", "all"] = "recorded",
    rules: Mapping[str, Any] | Literal["default"] | None = "default",
    step: int = 0,
    epoch: int = 0,
) -> Iterator[AttachedProbe]:
    """Attach hooks to a model for the duration of a `with` block.

        with instrument.attach(model, "hooks.yaml", optimizer=optimizer, out="runs/mine") as probe:
            for inputs, targets in loader:
                ...
                optimizer.step()
                probe.end_step(loss=loss)

    All hooks are removed when the block ends, also after an exception. A compiled model is compiled again at its next
    call. In a forked process, the hooks are removed at once, and nothing is written to the run of the parent.

    Args:
        model: The model: any `torch.nn.Module`.
        specs: The hook specs: the path of a YAML file, the name of a hook set of the package (`transformer`, as in
            `hooks=transformer`), a mapping or list with the content of such a file, or spec objects. The specs are at the top
            level or in a `hooks` section. A list can also have names of hook sets, and then mappings from names to specs:
            `["transformer", "moe", {"mine": {...}}]`. In them, None removes a hook of a set. Without any spec, the
            probe records no statistics, and rules that read only these are inactive.
        optimizer: One optimizer, or a list of several. The kinds `parameter_grad`, `step_pre` and `step_post` and roles
            such as `state.exp_avg` require it. With several optimizers, a hook on a parameter runs when the optimizer
            that holds the parameter makes its step. Pass the wrapper of a library itself, such as that of Accelerate or Opacus.
        scaler: The gradient scaler, if the loop uses one. Hooks then see and change unscaled gradients.
        out: The output folder, readable with `instrument.load`. It must not contain a run, except with `overwrite`, nor
            folders of runs. Default: None, which keeps all rows in memory. In both cases, the probe reads them: `probe.stats`,
            `probe.tensors(...)`.
        overwrite: Whether to replace the run in `out`. A run that a process still writes to is never replaced. Other files in
            the folder are kept, and so is the previous run if this one ends with a configuration error before its first
            step. Default: False.
        sink: A custom sink: an object with the methods of `instrument.Sink`. It receives all rows in place of the memory, or,
            with `out`, in addition to the files. Default: None.
        remote: A remote address such as `s3://bucket/prefix`. The files of `out` are uploaded there during the run.
            Requires `out`. Default: None.
        seed: The seed of all random numbers that interventions draw. Default: 0.
        steps_by_loop: Whether the loop calls `probe.before_optimizer_step()` itself. Required if the forward and
            backward passes run in the closure of `optimizer.step(closure)`. With several optimizers, pass the one that
            makes its step. Default: False.
        budget: Limits for the cost of record hooks: `{"time": "5%", "bytes": "2GB"}`, with one or both keys. Hooks over
            budget are sampled less often. Default: no limits.
        reduce: How the rows of several processes are combined. Applies if `torch.distributed` is initialized with more
            than one process; all processes must then call `attach`. `none` (default): each process writes its own rows.
            `global`: rank 0 writes one row for the shards and batch shards of all processes.
        mesh: The device mesh of the processes that train the model. Default: None, that of its sharded parameters.
        placement: How modules place tensors that are not DTensors, for modules that divide their work themselves, as Megatron-LM's do:
            `{"**.up": {"output": {"tp": "shard(-1)"}, "weight": {"tp": "shard(0)"}}}`, by pattern of module names, then `input`,
            `output` or the name of a parameter, then dimension of the mesh: `shard(DIMENSION)`, `replicate` or `partial`.
            Default: None.
        ids: The batches whose samples are written to the table `samples`, if the loop names them with `probe.batch`:
            those in which a tensor is recorded (`recorded`, default), or `all`.
        rules: Rules by name, in addition to the default rules and to those in the section `rules` of the file; an entry None
            removes a rule. `default` (default): no further rules. None: no rules at all.
        step: The first step, if the loop resumes a training: the number of steps before it. Default: 0.
        epoch: The first epoch, if the loop resumes a training. Default: 0.

    Yields:
        The probe, an `AttachedProbe`. Call `probe.end_step(loss=loss)` after each optimizer step. End the loop when
        `probe.should_stop` is true: a rule with `then: stop` fired, or `python -m instrument.control` requested it.

    Warns:
        InstrumentWarning: At the start: `specs` contains no hook. At the end of the block, once per finding: a hook fired
            less often than expected, with the reason; files that are not uploaded, with the command that uploads them;
            and every other event of severity `warning`.

    Raises:
        ConfigError: At the start: an argument has the wrong type, `seed`, `step` or `epoch` is not an integer from 0, a spec is invalid
            or matches no module, a required optimizer is missing, `out` or a folder in it contains a run already, or `remote` is
            not writable. At the first call of a module: a spec does not fit the shape of its tensor.
        HookError: A hook failed. The message contains the hook, its kind, the layer and the step. `HookResultError` if
            the result has the wrong type, shape, dtype or device.
        SinkError: Rows cannot be written, or the custom sink raised an exception.
        RankError: Another process ended, and a collective operation failed. The message contains its rank.
    """
    _check_type("model", model, nn.Module, "torch.nn.Module")
    _check_type("scaler", scaler, GradScaler | None, "torch.amp.GradScaler")
    _check_type("out", out, str | os.PathLike | None, "path")
    for name, number in (("seed", seed), ("step", step), ("epoch", epoch)):
        if not isinstance(number, Integral) or not 0 <= int(number) < 2**63:
            raise ConfigError(Problem(name, "must be an integer", given=number, allowed="0 to 2**63 - 1"))
    if ids not in ("recorded", "all"):
        raise ConfigError(Problem("ids", "not one of the allowed values", given=ids, allowed=("recorded", "all")))
    hooks = read_specs(specs)
    judged = read_rules(specs, rules)
    check_rules(judged, hooks)
    free_gathered_parameters(model)
    plan = make_plan(hooks, model)
    check_references(judged, hooks, [(site.spec.name, site.layer.name) for site in plan.sites])
    check_parameters(plan)
    check_function_names(plan)
    notice = prepare_compiled(model, plan)
    limits = parse_budget(budget)
    ranks = _ranks(model, hooks, limits, reduce, mesh, parse_placement(placement))
    settings: dict[str, Any] = {
        section: {name: spec.model_dump(exclude_unset=True, by_alias=True) for name, spec in specs_by_name.items()}
        for section, specs_by_name in (("hooks", hooks), ("rules", judged))
    }
    if ids == "all":
        settings["data"] = {"ids": ids}
    if out is not None:
        check_is_local(out, "out")
        out = Path(out).absolute()  # the loop may change the working directory
    probe = AttachedProbe(
        plan,
        _sink(out, sink),
        folder=out,
        info={"seed": seed, "device": _device(model), "config": settings},
        optimizer=optimizer,
        scaler=scaler,
        seed=seed,
        archive=RunArchive(1 if ranks is None else ranks.world_size),
        steps_by_loop=steps_by_loop,
        budget=limits,
        ranks=ranks,
        ids=ids,
        rules=judged,
    )
    probe.set_step(step, epoch)
    copy = _copy(out, remote)
    folder = None
    try:
        # The folder is created last: a configuration error must not leave an empty run behind. Signals are handled after the
        # assignment: the folder is closed below. They end the wait of other ranks for rank 0.
        with contextlib.nullcontext() if own_rank() else uninterrupted():
            if out is not None:
                folder = _folder(out, settings, model, seed, copy.address, overwrite=overwrite)
        with copy, contextlib.nullcontext() if folder is None else _recording(folder, probe), probe:
            copy.begin()
            if not hooks:
                message = (
                    "specs contains no hook: no statistics are recorded, and rules that read only these are inactive"
                )
                warnings.warn(message, InstrumentWarning, stacklevel=4)
            if notice is not None:
                probe.event("compiled", notice, severity="info")
            with reported_graph_breaks(probe):
                yield probe
            for message in copy.messages():
                probe.event("remote", message)
    finally:
        probe.detach()  # if a signal arrived before the probe's block ended
        if folder is not None:
            folder.close()
        for message in probe.warnings:
            warnings.warn(message, InstrumentWarning, stacklevel=4)


def _check_type(name: str, value: object, types: type | UnionType, allowed: str) -> None:
    if not isinstance(value, types):
        raise ConfigError(Problem(name, f"must be a {allowed}", given=type(value).__name__))


@contextmanager
def _recording(run_folder: RunFolder, probe: AttachedProbe) -> Iterator[None]:
    """Write to run.json how the block ended, and with several processes also which one failed first."""
    several = has_processes()
    dead_ranks = report_dead_ranks(run_folder.path, lambda rank: run_folder.update(failed_rank=rank))
    first_step = probe.step
    recording = run_folder.recording(has_started=lambda: probe.step > first_step, stop_reason=lambda: probe.stop_reason)
    with recording, dead_ranks if several else contextlib.nullcontext():
        run_folder.update(advice=probe.rules.custom_advice)
        run_folder.write_files(probe.rules.files)
        if not several:
            probe.accept_changes()
        yield
        run_folder.update(device_statistics=measured_by(), warnings=len(probe.warnings))


def _sink(out: Path | None, custom: Sink | None) -> Sink:
    """Return the sink of the probe: files, memory or a custom sink, or files and a custom sink."""
    own = None if custom is None else CustomSink(custom, "sink")
    if out is None:
        return own or MemorySink()
    files = ParquetSink(out)
    return files if own is None else TeeSink(files, {own.name: own}, required=[own.name])


def _copy(out: Path | None, remote: str | None) -> RemoteCopy:
    """Return the remote copy of a run; it does nothing if `remote` is None."""
    if out is None and remote is not None:
        message = "the rows are kept in memory, so there are no files to upload"
        raise ConfigError(Problem("remote", message, fix="pass out=FOLDER"))
    warn = partial(warnings.warn, category=InstrumentWarning)
    return RemoteCopy(out or Path(), SinkConfig(remote=remote), warn, where="remote")


def _ranks(
    model: nn.Module,
    hooks: Mapping[str, HookSpec],
    budget: BudgetConfig | None,
    reduce: str,
    mesh: DeviceMesh | None,
    placement: Declared,
) -> Ranks | None:
    if reduce not in ("none", "global"):
        raise ConfigError(Problem("reduce", "not one of the allowed values", given=reduce, allowed=("none", "global")))
    if not has_processes():
        return None
    parallel: Parallel = "own"
    problems = reduce_problems(budget, hooks) if reduce == "global" else []
    wrappers = wrappers_of(model)
    if wrappers and (mesh is not None or all(map(keeps_all_equal, wrappers))):
        parallel = "ddp"
    elif mesh is not None or any(map(is_sharded, model.parameters())):
        from torch.distributed.fsdp import FSDPModule

        parallel = "fsdp2"
        problems += shard_problems(hooks, by_fsdp2=any(isinstance(module, FSDPModule) for module in model.modules()))
    raise_problems(problems)
    return Ranks(parallel, reduces=reduce == "global", mesh=mesh, placement=placement)


def _folder(
    path: Path, settings: dict[str, Any], model: nn.Module, seed: int, remote: str | None, *, overwrite: bool
) -> RunFolder:
    if own_rank():
        if not has_processes():
            message = f"torchrun started this process with rank {own_rank()}, but it has no process group"
            fix = "call torch.distributed.init_process_group before attach"
            raise ConfigError(Problem("out", message, given=str(path), fix=fix))
        return WorkerRunFolder(path, own_rank(), where="out", remote=remote)
    return RunFolder(
        path,
        where="out",
        overwrite=overwrite,
        name=path.name,
        seed=seed,
        config=settings,
        config_hash=config_hash(settings),
        overrides={},
        device=_device(model),
        data=None,
        statistics=KERNEL,
        remote=remote,
        ranks=dist.get_world_size() if has_processes() else 1,
    )


def _device(model: nn.Module) -> str:
    """Return the device of the first parameter of a model; `cpu` without parameters."""
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else str(parameter.device)
