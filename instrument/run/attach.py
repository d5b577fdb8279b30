"""The hooks on a loop of one's own."""

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
from ..capture.optimized import Optimizers
from ..capture.probe import Probe
from ..capture.ranks import Ranks, own_rank
from ..capture.sink import Sink
from ..errors import ConfigError, InstrumentWarning, Mistake
from ..kinds.scope import Parallel
from ..plan.shapes import refuse_misfits
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
from .compiled import broken_graphs, graph_breaks, meet_compiled
from .folder import JoinedFolder, RunFolder, config_hash
from .ranks.processes import told_who_died
from .ranks.refusals import budget_mistakes, shard_mistakes
from .remote_copy import RemoteCopy

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
    """Attach hook specs to a model for the time of a `with` block.

    Args:
        model: Any module; when the block ends it has the hooks that it had before. One that was compiled is compiled
            again at its next call.
        specs: The path of a YAML file with the specs or with a `hooks` section, a mapping or list as it stands in
            such a file, or spec objects.
        optimizer: Needed by kinds at the optimizer boundary (parameter_grad, step_pre, step_post). A list of several, as of
            a GAN: each parameter belongs to the optimizer that holds it, and its hooks act when that one makes a step.
        scaler: The gradient scaler, where the loop uses one: gradients are then recorded and changed in true scale.
        out: The folder of the run, which `instrument.load` reads; it may not hold one yet. Without it rows are kept in
            memory: `probe.sink.frame("stats")`.
        remote: An address such as `s3://bucket/prefix`, below which the files of `out` are sent while the loop goes on.
        seed: The seed of what interventions draw at random.
        steps_by_loop: The loop calls `probe.before_optimizer_step()` itself, since its optimizer is given the forward
            and backward pass as a closure. Of several optimizers the loop says which: `before_optimizer_step(optimizer)`.
        budget: What record hooks may cost: `{"time": "5%", "bytes": "2GB"}`, one of them or both.
        reduce: Where `torch.distributed` is initialised with several processes, in all of which this is called at once:
            `none`, and each writes its own rows; `global`, and the first one writes one row for the parts of all of them.

    Yields:
        The probe, to be told when a step ends: `probe.end_step(loss=loss)`.

    Warns:
        InstrumentWarning: When the block is left: a hook did not fire as often as it should, and why; what is not in the
            remote folder, and what sends it.

    Raises:
        ConfigError: A spec cannot be meant, or matches nothing; the folder holds a run already, or the remote one cannot be
            written. At a module's first call: a spec does not fit the shape of a tensor there.
        HookError: A hook failed; the message names it, its kind, the layer and the step.
        RankError: Another process has ended, and a collective failed for that; the message names it.
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
    # The folder is made once nothing can be refused any more.
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
    """The record says how the block inside ended, and because of which of several processes."""
    several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    told = told_who_died(place.path, lambda rank: place.update(failed_rank=rank))
    with place.recording(is_begun=lambda: probe.step > 0), told if several else contextlib.nullcontext():
        yield


class _Warnings:
    """Tells what is missing in a remote folder, and nothing where all is there."""

    def warn(self, message: str) -> None:
        warnings.warn(message, InstrumentWarning, stacklevel=2)

    def sent(self, address: str, size: int) -> None:
        pass


def _copy(out: str | Path | None, remote: str | None) -> RemoteCopy:
    if out is None and remote is not None:
        raise ConfigError(
            Mistake("remote", "rows are kept in memory, and there are no files to send", allowed="out=FOLDER")
        )
    return RemoteCopy(Path(out or "."), SinkConfig(remote=remote), _Warnings(), where="remote")


def _ranks(model: nn.Module, hooks: Mapping[str, HookSpec], budget: BudgetConfig | None, reduce: str) -> Ranks | None:
    """The processes that train the model together, as far as that can be seen; None for a single one.

    Raises:
        ConfigError: What is asked for cannot be had of several processes, or of shards.
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
    """Hook specs from a file, from plain mappings, or from spec objects.

    Raises:
        ConfigError: The file is not there or is no YAML, or a spec cannot be meant.
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
    try:
        return yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(Mistake("specs", f"the file cannot be read: {error.strerror}", written=str(path))) from None
    except yaml.YAMLError as error:
        raise ConfigError(Mistake("specs", f"the file is not YAML: {error}", written=str(path))) from None


def _plain(spec: Any) -> Any:
    if isinstance(spec, HookBase):
        return {
            name: value
            for name, value in spec.model_dump(exclude_unset=True, by_alias=True).items()
            if name != "name" or value
        }
    return spec


def _device(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return "cpu" if parameter is None else str(parameter.device)
