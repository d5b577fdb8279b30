"""What is observed of a training in some steps: calls of losses and of `backward`, batches of data loaders, and a few gradients.

The losses of `torch.nn.functional` call functions in C, which are replaced meanwhile. A
`TorchFunctionMode` would change what some modules compute; see `instrument.plan.function_calls`. Compiled code is not observed.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple
from weakref import finalize

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.jit._builtins import _get_builtin_table
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.data import DistributedSampler, SequentialSampler, dataloader
from torch.utils.hooks import RemovableHandle

from ..hooks.clock import Clock, graph_task, operator_name
from ..runtime.lazy_compiler import has_compiled
from ..stats.fingerprint import fingerprint
from ..stats.flatten import is_wrapped
from ..values.nested import iter_tensors

MAX_ELEMENTS = 65_536  # of a tensor, evenly spaced, that a fingerprint reads
_KNOWN = ("torch", "accelerate")  # packages whose samplers have a length without side effects, and repeat no batch
TRAINING_THREADS: dict[object, int] = {}
"""The thread in which each probe is attached. It may have no observers in some steps."""


class ObservedFunctions:
    """Functions of PyTorch that are replaced while their calls are observed.

    Several threads can train a model each: an observer does not get the calls of other threads in which a probe is attached, or that have
    observers of their own.

    Args:
        places: The owner and the name of each function.
        observed: Returns the function that replaces one, given its name and the original. It calls `observers`.
    """

    def __init__(
        self, places: Sequence[tuple[Any, str]], observed: Callable[[str, Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        self._observers: list[tuple[Callable[[Any], None], int]] = []  # and the thread that added each
        self._lock = threading.RLock()
        self._places, self._observed = places, observed
        self._made: dict[str, tuple[Callable[..., Any], ...]] = {}  # by name: an original function, and its replacement
        self._replaced: list[tuple[Any, str, Callable[..., Any], Callable[..., Any]]] = []

    @property
    def observers(self) -> list[Callable[[Any], None]]:
        """The observers of a call in this thread: all if it has none and no attached probe, as those of `nn.DataParallel`."""
        observers, own = [*self._observers], threading.get_ident()
        has_own = own in [*TRAINING_THREADS.values()] or any(thread == own for _, thread in observers)
        return [observer for observer, thread in observers if thread == own or not has_own]

    def add(self, observer: Callable[[Any], None]) -> None:
        """Let a function observe the calls, until `remove`."""
        with self._lock:
            self._observers.append((observer, threading.get_ident()))
            if not self._replaced:
                for owner, name in self._places:
                    original = getattr(owner, name)
                    if name not in self._made or self._made[name][0] is not original:
                        self._made[name] = original, self._observed(name, original)
                    replacement = self._made[name][1]
                    self._replaced.append((owner, name, original, replacement))
                    setattr(owner, name, replacement)

    def remove(self, observer: Callable[[Any], None]) -> None:
        """End the observation by a function. Do nothing if it does not observe."""
        with self._lock:
            self._observers = [each for each in self._observers if each[0] != observer]
            # Otherwise, other code has replaced them too.
            if not self._observers and all(getattr(owner, name) is new for owner, name, _, new in self._replaced):
                while self._replaced:
                    owner, name, original, _ = self._replaced.pop()
                    setattr(owner, name, original)


class LoaderBatch(NamedTuple):
    """A batch of a data loader.

    Attributes:
        iterator: Identifies the pass over the data.
        number: The index of the batch in its pass, from 0.
        workers: The number of worker processes.
        batches: The number of batches of a pass; None if it is unknown, as for samplers that are not of PyTorch.
        may_repeat: Whether the sampler may give the same batch several times: it is not of PyTorch.
        fingerprints: The fingerprints of the tensors.
        in_order: Those of the tensors of one number for each sample, as int64 [samples], if the loader reads the samples of its dataset
            in their order, without shuffling.
        step: The training step that follows.
    """

    iterator: int
    number: int
    workers: int
    batches: int | None
    may_repeat: bool
    fingerprints: tuple[int, ...]
    in_order: tuple[int, ...]
    step: int = -1


def sampled_fingerprint(tensor: Tensor) -> int:
    """Return a number for the shape, the dtype and up to `MAX_ELEMENTS` elements of a dense tensor on any device."""
    flat = tensor.detach().reshape(-1)
    bits = fingerprint(flat[:: len(flat) // MAX_ELEMENTS + 1].cpu())
    return hash((int(bits), tensor.shape))


def is_readable(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read when the step ends."""
    is_plain = (
        type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    )
    return is_plain and not is_wrapped(tensor)


def version_of(tensor: Tensor) -> int:
    """Return the number of operations that have changed a tensor in place; 0 for one of `torch.inference_mode`."""
    return 0 if tensor.is_inference() else tensor._version


def _observed_batch(name: str, original: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ARG001
    @wraps(original)
    def next_batch(iterator: Any) -> Any:
        batch = original(iterator)
        observers = BATCHES.observers
        try:
            observed = _describe_batch(iterator, batch) if observers else None
        except Exception:  # the batch of any loader must reach the loop
            return batch
        if observed is not None and observed.fingerprints:
            for observer in observers:
                observer(observed)
        return batch

    return next_batch


def _describe_batch(iterator: Any, batch: Any) -> LoaderBatch:
    is_iterable = iterator._dataset_kind == dataloader._DatasetKind.Iterable
    may_repeat = not (is_iterable or _is_known(iterator._index_sampler))
    batches = None if is_iterable or may_repeat else len(iterator._index_sampler)
    sampler = getattr(iterator._index_sampler, "sampler", iterator._index_sampler)
    # A subclass can read another sampler.
    is_shuffled = sampler.shuffle if type(sampler) is DistributedSampler else not isinstance(sampler, SequentialSampler)
    tensors = [tensor for _, tensor in iter_tensors(batch) if is_readable(tensor)]
    labels = [each for each in tensors if not (is_iterable or is_shuffled) and each.ndim and each.numel() == len(each)]
    in_order = tuple(sampled_fingerprint(each.flatten().long()) for each in labels if not each.is_complex())
    number, workers = iterator._num_yielded - 1, iterator._num_workers
    prints = tuple(map(sampled_fingerprint, tensors))
    return LoaderBatch(id(iterator), number, workers, batches, may_repeat, prints, in_order)


def _is_known(sampler: Any) -> bool:
    """Return whether a sampler, and those that it reads, are known. The length of others may draw random numbers."""
    while sampler is not None:
        methods = type(sampler).__iter__, type(sampler).__len__
        if any(method.__module__.partition(".")[0] not in _KNOWN for method in methods):
            return False
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return True


BATCHES = ObservedFunctions([(dataloader._BaseDataLoaderIter, "__next__")], _observed_batch)
"""Observes each `LoaderBatch` of a data loader of this process."""


_NAMES = {
    "cross_entropy_loss": torch._C._nn,
    "nll_loss_nd": torch._C._nn,
    "binary_cross_entropy": torch._C._nn,
    "binary_cross_entropy_with_logits": torch,
    "mse_loss": torch._C._nn,
    "l1_loss": torch._C._nn,
    "smooth_l1_loss": torch._C._nn,
    "huber_loss": torch._C._nn,
    "soft_margin_loss": torch._C._nn,
    "hinge_embedding_loss": torch,
    "cosine_embedding_loss": torch,
    "kl_div": torch,
    "ctc_loss": torch,
}
"""Where the functions are. The arguments of those for classes are input, target, weight, reduction and ignore_index."""
OF_NUMBERS = ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")
UNCOUNTED = -(2**30)  # no class
MAX_SAMPLES, MAX_CLASSES = 64, 1000  # of the logits that are copied
TOLERANCE = 0.05  # of the sum of the probabilities of a sample
_UNCHANGED = frozenset([
    "View", "UnsafeView", "Squeeze", "Unsqueeze", "Select", "Slice", "Transpose", "Permute", "T", "ToCopy", "Clone", "Clamp",
])  # fmt: skip


class BinaryLossCall(NamedTuple):
    """A call of binary cross-entropy.

    Attributes:
        of_logits: Whether the loss applies a sigmoid to its input.
        operation: The operation that computes the input, such as `Sigmoid`, before views, casts and clamps; empty if it is unknown.
        targets: The targets. They are not copied.
        sums: The sum of the inputs of each sample, if they are [samples, classes] and come from a softmax; otherwise None.
    """

    of_logits: bool
    operation: str
    targets: Tensor
    sums: Tensor | None


class PairLossCall(NamedTuple):
    """A call of a loss of pairs of a prediction and a target, such as `mse_loss`, or of another one in `_NAMES`.

    Attributes:
        name: The name of the function.
        shape: The shape of the first input.
        broadcasts: Whether each of several predictions [samples, 1] is paired with each of as many targets [samples], or vice versa,
            and the result is one number.
        operation: The operation that computes the predictions, as in `BinaryLossCall`.
        targets: The targets. They are not copied. Those of `ctc_loss` are minus its blank, and `UNCOUNTED` after the end of a sample.
        result: The loss.
    """

    name: str
    shape: torch.Size
    broadcasts: bool
    operation: str
    targets: Tensor
    result: Tensor


class LossCall(NamedTuple):
    """A call of cross-entropy for classes.

    Attributes:
        shape: The shape of the logits.
        targets: The classes, int64, of the shape of the logits without the dimension of the classes. They are not copied.
        weight: The weight of each class, [classes]; None without weights.
        is_reduced: Whether the result is one number. Otherwise, the caller may leave targets out of its mean.
        ignore_index: The class of targets that do not count.
        is_mean: Whether the result is the mean.
        result: The loss.
        operation: The operation that computes the input of `cross_entropy`, as in `BinaryLossCall`; empty for other losses.
        logits: The logits. In `Training.losses`, a copy of the first 64 rows; None if they are not [samples, classes], or have more
            than 1,000 classes.
        is_likelihood: Whether it is a call of `nll_loss`, whose input is the logarithms of probabilities.
    """

    shape: torch.Size
    targets: Tensor
    weight: Tensor | None
    is_reduced: bool
    ignore_index: int
    is_mean: bool
    result: Tensor
    operation: str
    logits: Tensor | None
    is_likelihood: bool

    def has_probabilities(self) -> bool:
        """Return whether the input gives probabilities: the loss computes them, or those of most samples add up to 1."""
        if not self.is_likelihood or self.logits is None:
            return True
        sums = self.logits.float().exp().sum(1)
        return 2 * int(((sums - 1).abs() > TOLERANCE).sum()) <= len(sums)


AnyLossCall = LossCall | BinaryLossCall | PairLossCall


def copied(call: LossCall) -> LossCall:
    """Return a call that does not keep the memory of all its logits."""
    logits, is_small = call.logits, len(call.shape) == 2 and call.shape[1] <= MAX_CLASSES
    if logits is None or not is_small or not is_readable(logits):
        return call._replace(logits=None)
    return call._replace(logits=logits.detach()[:MAX_SAMPLES].clone())


def _observed_loss(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        if not is_compiling() and len(args) > 1 and args[0].requires_grad:
            loss = _describe_loss(name, args, result)
            if loss is not None:
                for observer in LOSSES.observers:
                    observer(loss)
        return result

    _get_builtin_table()[id(call)] = f"aten::{name}"  # TorchScript finds functions in C by their identity
    finalize(call, _get_builtin_table().pop, id(call), None)
    return call


def _describe_loss(name: str, args: tuple[Any, ...], result: Tensor) -> AnyLossCall | None:
    if name.startswith("binary"):
        operation = _operation(args[0])
        has_sums = operation == "Softmax" and args[0].ndim == 2 and all(map(is_readable, args[:2]))
        sums = args[0].detach().sum(1, dtype=torch.float32) if has_sums else None
        return BinaryLossCall(name.endswith("logits"), operation, args[1], sums)
    if name not in ("cross_entropy_loss", "nll_loss_nd"):
        last = {"ctc_loss": 4, "cosine_embedding_loss": 2}.get(name, 1)  # the last argument that is read
        if len(args) <= last or (name == "ctc_loss" and is_captured(args[1])):
            return None
        broadcasts = result.ndim == 0 and _is_outer(*args[:2])
        targets = _ctc_targets(args[1], *args[3:5]) if name == "ctc_loss" else args[last]
        return PairLossCall(name, args[0].shape, broadcasts, _operation(args[0]), targets, result)
    if len(args) < 5 or args[1].dtype != torch.int64 or not is_readable(args[1]):
        return None
    logits, targets, weight, reduction, ignore_index = args[:5]
    if is_captured(targets):
        return None
    return LossCall(
        logits.shape,
        targets,
        weight,
        reduction != 0,
        ignore_index,
        reduction == 1,
        result,
        _operation(logits) if name == "cross_entropy_loss" else "",
        logits,
        name == "nll_loss_nd",
    )


def is_captured(tensor: Tensor) -> bool:
    """Return whether no values can be read on the device of a tensor, because a graph of CUDA is captured."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def _ctc_targets(targets: Tensor, lengths: Any, blank: int) -> Tensor:
    if not is_readable(targets):
        return targets
    if targets.ndim != 2:
        return targets - blank
    counted = torch.arange(targets.shape[1], device="cpu") < torch.as_tensor(lengths, device="cpu").view(-1, 1)
    return torch.where(counted.to(targets.device), targets - blank, UNCOUNTED)


def _is_outer(predictions: Tensor, targets: Tensor) -> bool:
    """Return whether two tensors are views of columns and rows, [samples, samples], as of [samples, 1] and [samples]."""
    shape = predictions.shape
    if len(shape) != 2 or shape != targets.shape or shape[0] != shape[1] or shape[0] == 1:
        return False
    strides = [predictions.stride(), targets.stride()]
    return any(one[0] == 0 < one[1] and other[1] == 0 < other[0] for one, other in (strides, reversed(strides)))


def _operation(tensor: Tensor) -> str:
    """Return the operation that computed a tensor, before those of `_UNCHANGED`; empty if it is unknown."""
    node = tensor.grad_fn
    while node is not None:
        name = operator_name(node).rpartition("Backward")[0]  # `TanhBackwardBackward0` is no Tanh
        if name not in _UNCHANGED:
            return name
        node = node.next_functions[0][0]
    return ""


LOSSES = ObservedFunctions([(module, name) for name, module in _NAMES.items()], _observed_loss)
"""Observes each call of a loss whose input requires gradients."""


PER_OPTIMIZER = 4
MAX_MICRO_STEPS = 256  # without a step of the optimizer, gradients may be added without end


def smallest_parameters(optimizer: Optimizer) -> list[Parameter]:
    """Return the smallest trainable parameter of each of the first groups of an optimizer, at most `PER_OPTIMIZER`."""
    groups = [
        [each for each in group["params"] if type(each) is Parameter and each.requires_grad and not each.is_meta]
        for group in optimizer.param_groups
    ]
    return [min(group, key=Parameter.numel) for group in groups if group][:PER_OPTIMIZER]


class AccumulatedGradient:
    """The gradient of a parameter, and what is added to it.

    Operations other than the addition of a gradient end a sum: they clear it, or change what the loop wants to add to. This is known
    from the version of the tensor, without reading values.

    Attributes:
        parameter: The parameter.
        micro_steps: The last micro-steps of the gradients in the sum.
        has_old: Whether the sum contains the gradient that the last step of the optimizer used.
        has_stepped: Whether the optimizer has made a step.
        copy: A copy of the sum; None without one.
    """

    def __init__(self, parameter: Parameter, clock: Clock) -> None:
        self.parameter = parameter
        self._clock = clock
        self._last: tuple[Tensor, int] | None = None
        self._is_added = False  # whether the gradient that arrives now is added to the sum
        self.micro_steps: deque[int] = deque(maxlen=MAX_MICRO_STEPS)
        self.has_old = self.has_stepped = False
        self.copy: Tensor | None = None

    def attach(self) -> list[RemovableHandle]:
        """Register the hooks before and after a gradient is added."""
        before: Callable[[Tensor], Any] = self._before
        return [self.parameter.register_hook(before), self.parameter.register_post_accumulate_grad_hook(self._after)]

    def release(self) -> None:
        """Drop the dictionary of the removed hook, which each backward pass would read.

        It stays if it has other hooks, if a graph may depend on it, or in a backward pass, in which PyTorch may be reading it.
        """
        if not (self.parameter._backward_hooks or has_compiled() or graph_task() >= 0):
            self.parameter._backward_hooks = None

    def _before(self, gradient: Tensor) -> None:  # noqa: ARG002
        current, last = self.parameter.grad, self._last
        self._is_added = (
            current is not None and last is not None and current is last[0] and version_of(current) == last[1]
        )
        if self._is_added and self.has_old and current is not None:
            # The versions do not count `gradient.data.zero_()`.
            self._is_added = current.layout is torch.strided and bool(current.any())

    def _after(self, parameter: Tensor) -> None:
        if not self._is_added:
            self.has_old = False
            self.micro_steps.clear()
        gradient = parameter.grad
        self._last = None if gradient is None else (gradient, version_of(gradient))
        self.micro_steps.append(self._clock.moment.micro_step)
        self.copy = None if gradient is None else gradient.detach().clone()

    def end_step(self) -> None:
        """Begin a new sum after a step of the optimizer. It contains the old gradient until this one is cleared."""
        gradient = self.parameter.grad
        self._last = None if gradient is None else (gradient, version_of(gradient))
        self.has_old, self.has_stepped = gradient is not None, True
        self.micro_steps.clear()
        self.copy = None

    def relative_change(self) -> Tensor | None:
        """Return the norm of the gradient relative to that of the sum, a scalar: 1 if no operation has changed it. None if unknown."""
        gradient = self.parameter.grad
        if gradient is None or self.copy is None or gradient.layout is not torch.strided:
            return None
        change: Tensor = torch.linalg.vector_norm(gradient.detach()) / torch.linalg.vector_norm(self.copy)
        return change


def _observed_backward(name: str, original: Callable[..., Any]) -> Callable[..., Any]:  # noqa: ARG001
    @wraps(original)
    def call(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not is_compiling():
            for observer in BACKWARDS.observers:
                observer(tensor)
        return original(tensor, *args, **kwargs)

    return call


BACKWARDS = ObservedFunctions([(Tensor, "backward")], _observed_backward)
"""Observes the tensor of each call of `Tensor.backward` before it."""
