"""Entry point for custom training loops: `attach`."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist
import yaml
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.parallel import DistributedDataParallel

from ..analysis.archive import RunArchive
from ..capture.optimizer_checks import Optimizers
from ..capture.probe import Probe
from ..capture.reducer import Ranks, own_rank
from ..capture.sink import Sink
from ..distributed.processes import told_who_died
from ..distributed.unsupported import budget_mistakes, shard_mistakes
from ..errors import ConfigError, InstrumentWarning, Mistake
from ..folders.remote_copy import RemoteCopy
from ..folders.run_folder import JoinedFolder, RunFolder, config_hash
from ..kinds.scope import Parallel
from ..plan.dimension_checks import refuse_misfits
from ..plan.sites import make_plan
from ..sharded import is_sharded
from ..sinks.memory import MemorySink
from ..sinks.parquet import ParquetSink
from ..spec.base import HookBase
from ..spec.budget import BudgetConfig
from ..spec.config import SinkConfig
from ..spec.hooks import HookSpec
from ..spec.parse import parse_budget, parse_hooks
from ..stats.single_pass import KERNEL
from ..training.compiled import broken_graphs, graph_breaks, meet_compiled

Specs = str | Path | Mapping[str, Any] | Sequence[Any]


@contextmanager
def attach(
    model: nn.Module,
    specs: Specs,
    *,
    optimizer: Optimizers = None,
    scaler: GradScaler | None = None,
    out: str | Path | None = None,
    remote: str | None = None,
    seed: int = 0,
    steps_by_loop: bool = False,
    budget: Mapping[str, Any] | None = None,
    reduce: Literal["none", "global"] = "none",
) -> Iterator[Probe]:
    """Attach hooks to a model for the duration of a `with` block.

        with instrument.attach(model, "hooks.yaml", optimizer=optimizer, out="runs/mine") as probe:
            for inputs, targets in loader:
                ...
                optimizer.step()
                probe.end_step(loss=loss)

    All hooks are removed when the block ends, also after an exception. A compiled model is compiled again at its next
    call.

    Args:
        model: The model: any `torch.nn.Module`.
        specs: The hook specs: the path of a YAML file, a mapping or list with the content of such a file, or spec
            objects. The specs are at the top level or in a `hooks` section.
        optimizer: One optimizer, or a list of several. The kinds `parameter_grad`, `step_pre` and `step_post` and roles
            such as `state.exp_avg` require it. With several optimizers, a hook on a parameter runs when the optimizer
            that holds the parameter makes its step.
        scaler: The gradient scaler, if the loop uses one. Hooks then see and change unscaled gradients.
        out: The output folder, readable with `instrument.load`. It must not contain a run. Default: None, which keeps
            all rows in memory; read them with `probe.sink.frame("stats")`.
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

    Yields:
        The probe. Call `probe.end_step(loss=loss)` after each optimizer step.

    Warns:
        InstrumentWarning: At the end of the block, once per finding: a hook fired less often than expected, with the
            reason; files that are not uploaded, with the command that uploads them; and every other event of severity
            `warning`.

    Raises:
        ConfigError: At the start: a spec is invalid or matches no module, a required optimizer is missing, `out`
            contains a run already, or `remote` is not writable. At the first call of a module: a spec does not fit the
            shape of its tensor.
        HookError: A hook failed. The message contains the hook, its kind, the layer and the step. `HookResultError` if
            the result has the wrong type, shape, dtype or device.
        SinkError: Rows cannot be written.
        RankError: Another process ended, and a collective operation failed. The message contains its rank.
    """
    hooks = read_specs(specs)
    plan = make_plan(hooks, model)
    refuse_misfits(plan, {})
    notice = meet_compiled(model, plan)
    limits = parse_budget(budget)
    ranks = _ranks(model, hooks, limits, reduce)
    sink: Sink = MemorySink() if out is None else ParquetSink(Path(out))
    attached = Probe(
        plan,
        sink,
        optimizer=optimizer,
        scaler=scaler,
        seed=seed,
        archive=RunArchive(1 if ranks is None else ranks.size),
        steps_by_loop=steps_by_loop,
        budget=limits,
        ranks=ranks,
    )
    copy = _copy(out, remote)
    # The folder is created last: a configuration error must not leave an empty run behind.
    place = None if out is None else _folder(Path(out), hooks, model, seed, copy.address)
    try:
        with copy, contextlib.nullcontext() if place is None else _recording(place, attached), attached as probe:
            copy.begin()
            if notice is not None:
                probe.event("compiled", notice, severity="info")
            breaks = graph_breaks()
            yield probe
            if message := broken_graphs(breaks):
                probe.event("graph_break", message, severity="info")
            for message in copy.messages():
                probe.event("remote", message)
    finally:
        for message in attached.warnings:
            warnings.warn(message, InstrumentWarning, stacklevel=3)


@contextmanager
def _recording(place: RunFolder | JoinedFolder, probe: Probe) -> Iterator[None]:
    """Write to run.json how the block ended, and with several processes also which one failed first."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    told = told_who_died(place.path, lambda rank: place.update(failed_rank=rank))
    with place.recording(is_begun=lambda: probe.step > 0), told if several else contextlib.nullcontext():
        yield


class _Warnings:
    """Display of uploads that issues warnings and ignores successful uploads."""

    def warn(self, message: str) -> None:
        warnings.warn(message, InstrumentWarning, stacklevel=2)

    def sent(self, address: str, size: int) -> None:
        pass


def _copy(out: str | Path | None, remote: str | None) -> RemoteCopy:
    """Return the remote copy of a run; it does nothing if `remote` is None.

    Raises:
        ConfigError: `remote` is given without `out`, or the address is invalid.
    """
    if out is None and remote is not None:
        raise ConfigError(
            Mistake("remote", "rows are kept in memory, and there are no files to send", allowed="out=FOLDER")
        )
    return RemoteCopy(Path(out or "."), SinkConfig(remote=remote), _Warnings(), where="remote")


def _ranks(model: nn.Module, hooks: Mapping[str, HookSpec], budget: BudgetConfig | None, reduce: str) -> Ranks | None:
    """Return the group of processes that train the model; None for a single process.

    Raises:
        ConfigError: An argument or a hook is not supported with several processes or with sharded parameters.
    """
    if reduce not in ("none", "global"):
        raise ConfigError(Mistake("reduce", "has to be one of two", written=reduce, allowed=("none", "global")))
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return None
    parallel: Parallel = "own"
    mistakes = budget_mistakes(budget) if reduce == "global" else []
    if any(isinstance(module, DistributedDataParallel) for module in model.modules()):
        parallel = "ddp"
    elif sharded := [parameter for parameter in model.parameters() if is_sharded(parameter)]:
        parallel = "fsdp2"
        mistakes += shard_mistakes(hooks)
        if reduce == "global" and not all(place.is_shard() for parameter in sharded for place in parameter.placements):
            problem = "some parameters are the same in several processes, and would count as often"
            mistakes.append(Mistake("reduce", problem, written=reduce, allowed="none"))
    if mistakes:
        raise ConfigError(*mistakes)
    return Ranks(parallel, reduces=reduce == "global")


def _folder(
    path: Path, hooks: dict[str, HookSpec], model: nn.Module, seed: int, remote: str | None
) -> RunFolder | JoinedFolder:
    """Create the folder of the run on rank 0, or join it on other ranks."""
    if own_rank():
        return JoinedFolder(path, own_rank(), where="out")
    told = {name: spec.model_dump(exclude_unset=True, by_alias=True) for name, spec in hooks.items()}
    return RunFolder(
        path,
        where="out",
        name=path.name,
        seed=seed,
        config={"hooks": told},
        config_hash=config_hash(told),
        overrides={},
        device=_device(model),
        data=None,
        statistics=KERNEL,
        remote=remote,
        ranks=dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1,
    )


def read_specs(specs: Specs) -> dict[str, HookSpec]:
    """Parse hook specs from a file, from plain mappings, or from spec objects.

    Args:
        specs: See `attach`.

    Returns:
        The specs by name.

    Raises:
        ConfigError: The file cannot be read or is not YAML, or a spec is invalid.
    """
    given = _read_file(Path(specs)) if isinstance(specs, str | Path) else specs
    if isinstance(given, Mapping) and isinstance(given.get("hooks"), Mapping | list):
        given = given["hooks"]
    if isinstance(given, Mapping):
        return parse_hooks({name: _plain(spec) for name, spec in given.items()})
    if isinstance(given, Sequence) and not isinstance(given, str):
        return parse_hooks([_plain(spec) for spec in given])
    return parse_hooks(given)


def _read_file(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        ConfigError: The file cannot be read or is not YAML.
    """
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(Mistake("specs", f"the file cannot be read: {error.strerror}", written=str(path))) from None
    except yaml.YAMLError as error:
        raise ConfigError(Mistake("specs", f"the file is not YAML: {error}", written=str(path))) from None


def _plain(spec: Any) -> Any:
    """Convert a spec object to a mapping. Other values are returned unchanged."""
    if isinstance(spec, HookBase):
        return {
            name: value
            for name, value in spec.model_dump(exclude_unset=True, by_alias=True).items()
            if name != "name" or value
        }
    return spec


def _device(model: nn.Module) -> str:
    """Return the device of the first parameter of a model; `cpu` without parameters."""
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else str(parameter.device)
