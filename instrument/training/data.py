"""The data of a run: datasets, the slices for training and evaluation, and the options and the sampler of their batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import Dataset, DistributedSampler, IterableDataset, default_collate

from ..config.experiment import DataConfig, SliceSpec
from ..errors import ConfigError, Problem
from ..fields.field_types import Target
from ..fields.targets import argument_names, build, build_callable
from ..probe.samples import TARGET_KEYS
from .datasets import DatasetMissingError
from .loader import FULL_BATCH, BatchShard, LoaderOptions, Slice, Stream, preserved_random_states, seed_random_states

FIXES_OF_MISSING_DATASET = """\
    1. store it in the layout of torchvision, and set data.root=FOLDER or the environment variable INSTRUMENT_DATA=FOLDER
    2. run once with a network connection and data.dataset.download=true
    3. use a dataset that requires no download: data=digits, or data.fallback=digits as a fallback"""
DIGITS_AS_MNIST = Target.model_validate({"_target_": "instrument.training.datasets.digits", "size": 28})
USUAL_SPLITS = {"data.slice": ("train", "trainval"), "data.eval_slice": ("test", "val", "validation", "valid")}
"""The splits that are tried in this order if a slice names none. The names are those of torchvision and Hugging Face."""


@dataclass(frozen=True)
class Data:
    """The slices of a dataset and their origin."""

    train: Dataset[Any]
    test: Dataset[Any] | None  # the evaluation slice; None in `mode: forward`, which has no evaluations
    probe: Dataset[Any] | None  # the samples of the probe batch; None without one
    # The entry `data` of run.json: the target of the dataset, its root, the number of samples of the slices (None for an iterable dataset),
    # their splits (None for a dataset that takes none), and the reason for the fallback (None if the requested dataset is used).
    source: dict[str, Any]
    # The warning that samples of a dataset without splits are used for training and for evaluation; None if there are no such samples.
    overlap: str | None = None


def load_data(config: DataConfig, *, evaluates: bool = True) -> Data:
    """Load the slices; that for evaluation only if the run has evaluations.

    Raise a ConfigError if the dataset is missing without a fallback, or if its target, a slice or an option does not fit it.
    """
    fallback = None
    targets = [config.dataset] if config.fallback is None else [config.dataset, DIGITS_AS_MNIST]
    slices = {"data.slice": config.slice} | ({"data.eval_slice": config.eval_slice} if evaluates else {})
    for target in targets:
        try:
            loaded = [load_split(target, which.split, where) for where, which in slices.items()]
            break
        except DatasetMissingError as missing:
            if target is targets[-1]:
                message = f"{target.target} is missing: {missing}"
                message += "" if missing.fix else f". Do one of the following:\n{FIXES_OF_MISSING_DATASET}"
                raise ConfigError(Problem("data.dataset", message, fix=missing.fix)) from None
            name = target.target.rpartition(".")[2]
            fallback = f"{name} is missing ({missing}); using the digits of scikit-learn instead, resized to 28x28"
    chosen, *evaluated = (
        _slice(dataset, which, where) for (dataset, _), (where, which) in zip(loaded, slices.items(), strict=True)
    )
    test = evaluated[0] if evaluated else None
    if config.num_workers > 1 and (isinstance(chosen, Stream) or isinstance(test, Stream)):
        message = "the order of an iterable dataset defines its batches, so one worker at most reads it"
        raise ConfigError(Problem("data.num_workers", message, given=config.num_workers, allowed="0, 1"))
    if config.sampler is not None and isinstance(chosen, Stream):
        message = "a sampler requires a dataset with a length, but this dataset is iterable"
        raise ConfigError(Problem("data.sampler", message, given=config.sampler.target, allowed="null"))
    probe = None
    if test is not None and config.probe_batch is not None:
        if isinstance(test, Stream):
            message = "the evaluation samples come from an iterable dataset, which has no index"
            raise ConfigError(Problem("data.probe_batch", message, fix="use a dataset with a length"))
        if (stop := config.probe_batch.stop) is not None and stop > len(test):
            message = f"the probe batch ends at sample {stop}, but data.eval_slice has {len(test)} samples"
            raise ConfigError(Problem("data.probe_batch", message, stop, f"at most {len(test)}"))
        probe = Slice(test, slice_indices(test, config.probe_batch, "data.probe_batch"))
    source = {
        "dataset": target.target,
        "root": config.root,
        "train_samples": None if isinstance(chosen, Stream) else len(chosen),
        "eval_samples": None if isinstance(test, Stream) else 0 if test is None else len(test),
        "train_split": loaded[0][1],
        "eval_split": loaded[-1][1] if evaluates else None,
        "fallback": fallback,
    }
    has_splits = source["train_split"] is not None
    return Data(chosen, test, probe, source, overlap=None if has_splits else _overlap(target, chosen, test))


def _overlap(target: Target, chosen: Slice | Stream, test: Slice | Stream | None) -> str | None:
    """Return a warning if a dataset without splits gives the same samples for training and for evaluation."""
    if test is None:
        return None
    if isinstance(chosen, Slice) and isinstance(test, Slice):
        shared = len({*chosen.indices} & {*test.indices})
        which = f"{shared:,} of {len(test):,} evaluation samples"
    else:
        streams = [part for part in (chosen, test) if isinstance(part, Stream)]
        start = max(stream.start for stream in streams)
        shared = all(stream.stop is None or start < stream.stop for stream in streams)
        which = "evaluation samples"
    if not shared:
        return None
    return (
        f"{which} are training samples too, because both slices are of the same split of {target.target}; "
        "to evaluate other samples, set data.slice and data.eval_slice"
    )


def _slice(dataset: Dataset[Any], which: SliceSpec, where: str) -> Slice | Stream:
    if not is_iterable(dataset):
        return Slice(dataset, slice_indices(dataset, which, where))
    if fields := which.model_dump(exclude_defaults=True).keys() - {"split", "start", "stop"}:
        message = f"the dataset is iterable and has no length, so {', '.join(sorted(fields))} cannot be applied"
        raise ConfigError(Problem(where, message, allowed="split, start, stop"))
    return Stream(dataset, which.start, which.stop)  # type: ignore[arg-type]


def loader_options(
    config: DataConfig, seed: int, *, pins_memory: bool, shard: BatchShard = FULL_BATCH
) -> LoaderOptions:
    """Return how batches are loaded. `pins_memory`: whether the device reads pinned memory."""
    given = config.collate_fn
    collate_fn = default_collate if given is None else build_callable(given, "data.collate_fn")
    return LoaderOptions(collate_fn, config.num_workers, config.pin_memory and pins_memory, seed, shard)


def build_sampler(target: Target, dataset: Dataset[Any]) -> Iterable[int]:
    """Build a sampler from its target, which is called with the dataset slice. Raise a ConfigError unless it gives indices."""
    with preserved_random_states():
        sampler = build(target, "data.sampler", dataset)
    message = ""
    if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
        message = f"must have a length and be iterable, but {target.target} returned {type(sampler).__name__}"
    elif not len(sampler):
        message = f"must give indices, but {target.target} returned an empty {type(sampler).__name__}"
    elif isinstance(sampler, DistributedSampler):
        message = "the samples are distributed over the processes by this package, so a sampler must return all indices"
    if message:
        allowed = "a torch.utils.data.Sampler with a length, such as RandomSampler"
        raise ConfigError(Problem("data.sampler", message, given=target.target, allowed=allowed))
    return sampler  # type: ignore[no-any-return]


def load_split(target: Target, split: str | None, where: str) -> tuple[Dataset[Any], str | None]:
    """Build the dataset of a slice. Return it, and the split that it was built with; None if it was built without one.

    The split is passed as `train=True` or `False`, or else as `split=`, if the target has this parameter and its configuration
    does not set it. In a dataset with both parameters, such as EMNIST, `split` is not a part of the samples, but another dataset.

    Raises:
        ConfigError: The target does not exist or fails, does not accept the split, or returns something else than a dataset.
        DatasetMissingError: The files of the dataset are missing.
    """
    parameters = argument_names(target.target, "data.dataset")
    parameter = next((name for name in ("train", "split") if name in parameters), None)
    is_fixed = parameter in (target.model_extra or {})
    if split is not None and (is_fixed or parameter is None):
        message = f"{target.target} takes neither 'split' nor 'train'"
        if is_fixed:
            message = f"data.dataset.{parameter} selects the same samples for all slices"
        fix = f"remove {f'data.dataset.{parameter}' if is_fixed else f'{where}.split'}"
        raise ConfigError(Problem(f"{where}.split", message, split, fix=fix))
    if is_fixed or parameter is None:
        return _build(target), None
    names = (split,) if split is not None else USUAL_SPLITS[where]
    if parameter == "train":
        if names[0] not in ("train", "test"):
            message = f"{target.target} takes train=True or False, not the name of a split"
            raise ConfigError(Problem(f"{where}.split", message, names[0], "train, test"))
        return _build(target, train=names[0] == "train"), names[0]
    return _first_accepted(target, names, where)


def _first_accepted(target: Target, names: Sequence[str], where: str) -> tuple[Dataset[Any], str]:
    refusals: list[ConfigError] = []
    for name in names:
        try:
            return _build(target, split=name), name
        except ConfigError as error:
            causes = (str(each) for each in _causes(error.__cause__) if isinstance(each, ValueError | KeyError))
            failure = next(causes, "")
            if "split" not in failure.lower() and name not in failure:
                raise
            refusals.append(error)
    *others, last = map(repr, names)
    listed = f"the split {last}" if not others else f"a split {', '.join(others)} or {last}"
    reason = refusals[0].problems[0].message.partition("could not be built: ")[2]
    message = f"{target.target} does not accept {listed} ({reason})"
    raise ConfigError(Problem(f"{where}.split", message, fix=f"set {where}.split=NAME")) from refusals[0]


def _build(target: Target, **split: Any) -> Dataset[Any]:
    try:
        dataset = build(target, "data.dataset", **split)
    except ConfigError as error:
        for cause in _causes(error):
            if isinstance(cause, DatasetMissingError):
                raise cause from None
        raise
    if is_iterable(dataset) and (not hasattr(dataset, "__iter__") or hasattr(dataset, "__next__")):
        message = f"must be a dataset, but {target.target} returned {type(dataset).__name__}"
        message += ", an iterator, which can be read only once" if hasattr(dataset, "__next__") else ""
        allowed = "an object with __len__ and __getitem__, or one whose __iter__ starts from the beginning"
        raise ConfigError(Problem("data.dataset", message, allowed=allowed))
    return dataset  # type: ignore[no-any-return]


def is_iterable(dataset: Any) -> bool:
    """Return whether a dataset gives its samples one after the other, without a length and an index."""
    has_items = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
    return isinstance(dataset, IterableDataset) or not has_items


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def slice_indices(dataset: Dataset[Any], which: SliceSpec, where: str) -> list[int]:
    """Return the indices of the samples in a slice. Raise a ConfigError if it is empty or cannot be applied to the dataset.

    The fields of the slice apply in this order: `classes`, `shuffle`, `indices` or `start`/`stop`/`stride`, `per_class`.
    """
    size = len(dataset)  # type: ignore[arg-type]
    indices = list(range(size))
    if which.classes is not None:
        targets = _targets(dataset, f"{where}.classes")
        indices = [i for i in indices if targets[i] in which.classes]
    if which.shuffle:
        order = torch.randperm(len(indices), generator=torch.Generator().manual_seed(which.seed)).tolist()
        indices = [indices[i] for i in order]
    if which.indices is not None:
        out_of_range = [i for i in which.indices if i >= len(indices)]
        if out_of_range:
            allowed = f"0 to {len(indices) - 1}"
            raise ConfigError(Problem(f"{where}.indices", "out of range", out_of_range, allowed))
        indices = [indices[i] for i in which.indices]
    else:
        indices = indices[which.start : which.stop : which.stride]
    if which.per_class is not None:
        targets, counts = _targets(dataset, f"{where}.per_class"), dict[Any, int]()
        selected = []
        for i in indices:
            counts[targets[i]] = counts.get(targets[i], 0) + 1
            if counts[targets[i]] <= which.per_class:
                selected.append(i)
        indices = selected
    if not indices:
        written = which.model_dump(exclude_defaults=True)
        raise ConfigError(Problem(where, f"the slice is empty: the split has {size} samples", given=written))
    return indices


def _targets(dataset: Dataset[Any], where: str) -> list[int]:
    targets = getattr(dataset, "targets", None)
    try:
        if targets is None:
            targets = []
            with preserved_random_states():
                seed_random_states(0)
                for i in range(len(dataset)):  # type: ignore[arg-type]
                    item = dataset[i]
                    key = next(name for name in TARGET_KEYS if name in item) if isinstance(item, Mapping) else 1
                    targets.append(item[key])
        return [int(target) for target in targets]
    except (TypeError, ValueError, LookupError, RuntimeError) as error:
        message = f"the targets of this dataset are not integer classes: {type(error).__name__}: {error}"
        raise ConfigError(Problem(where, message)) from None
