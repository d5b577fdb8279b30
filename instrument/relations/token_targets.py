"""The targets of a language model, compared with the tokens of its input, and whether its outputs depend on later tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from ..hooks.module_copies import copy_arguments, copy_modules
from ..runtime.random_states import preserve_python_and_numpy
from ..values.dtensor import is_sharded
from ..values.nested import iter_tensors
from .observations import LossCall
from .relation import ModelCall, Training

SHIFTS = (1, 0, 2, -1)
MIN_TOKENS, MIN_DIFFERENT = 16, 3  # fewer tokens can be equal by chance
_OTHER_INPUTS = ("label", "target", "mask", "position", "token_type")  # in the names of inputs that are no tokens
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}  # of the largest output; of half precision: 1e-2


class TokenTargets(NamedTuple):
    """The targets of one call of cross-entropy, and the tokens of one input of the model."""

    path: str  # of the input
    tokens: Tensor  # the input, int64 [samples, positions], on the CPU
    targets: Tensor  # int64 [samples, positions or positions - 1]
    counted: Tensor  # whether a target counts in the loss, bool of the same shape
    shift: int | None  # the target at t is the token at t + shift; None if that holds for none of `SHIFTS`
    is_time_first: bool  # whether the input is [positions, samples]
    call: ModelCall
    loss: LossCall

    @property
    def total(self) -> int:
        """The number of targets that count."""
        return int(self.counted.sum())


def token_targets(training: Training) -> list[TokenTargets]:
    """Compare the targets of this step with the tokens in the inputs of the model, in both orders of the dimensions."""
    found = []
    for loss in training.losses:
        for call in training.inputs:
            for path, tokens in _tokens(call, loss.targets).items():
                both = [*_compare(path, tokens, loss, call)]
                found += [each for each in both if each.shift is not None] or both[:1]
    return found


def _tokens(call: ModelCall, targets: Tensor) -> dict[str, Tensor]:
    """Return the inputs of a call that can be tokens. Of several inputs, those that are the targets are left out."""
    tokens = {
        path: tensor
        for path, tensor in call.tensors.items()
        if tensor.dtype in (torch.int64, torch.int32)
        and tensor.ndim == 2
        and not any(name in path for name in _OTHER_INPUTS)
    }
    others = {path: tensor for path, tensor in tokens.items() if tensor.data_ptr() != targets.data_ptr()}
    return others or dict([*tokens.items()][:1])


def _compare(path: str, tokens: Tensor, loss: LossCall, call: ModelCall) -> Iterator[TokenTargets]:
    flat, given = loss.targets.detach().cpu().flatten(), tokens.detach().cpu().long()
    for is_time_first in (False, True):
        ids = given.T if is_time_first else given
        samples, positions = ids.shape
        length = len(flat) // max(samples, 1)
        if positions < 3 or length * samples != len(flat) or not positions - 1 <= length <= positions:
            continue
        labels = flat.view(length, samples).T if is_time_first else flat.view(samples, length)
        counted = labels != loss.ignore_index
        shift = next((shift for shift in SHIFTS if _is_shifted(ids, labels, counted, shift)), None)
        yield TokenTargets(path, ids, labels, counted, shift, is_time_first, call, loss)


def _is_shifted(ids: Tensor, labels: Tensor, counted: Tensor, shift: int) -> bool:
    """Return whether all targets that count are the tokens at positions that differ by `shift`."""
    first, stop = max(0, -shift), min(labels.shape[1], ids.shape[1] - shift)
    where = counted[:, first:stop]
    expected, actual = ids[:, first + shift : stop + shift][where], labels[:, first:stop][where]
    return len(actual) >= MIN_TOKENS and torch.equal(expected, actual) and len(actual[:4096].unique()) >= MIN_DIFFERENT


class Causality(NamedTuple):
    """How the logits of a model change if the token at one position changes.

    A model may have several, such as one for each direction. Which of them belong to a loss is unknown.
    """

    # The largest change at an earlier position, relative to the largest logit; the smallest one of several logits.
    ahead: float = 0.0
    looks_ahead: bool = False  # whether all logits use later tokens: the change exceeds the rounding
    is_causal: bool = False  # whether all logits are known to use earlier tokens and no later ones
    problem: str = ""  # why it is unknown; empty if it is known


def causality(training: Training, of: TokenTargets) -> Causality:
    """Change one token of one sample and compute its outputs again; see `call_again`."""
    row = int(of.counted.sum(1).argmax())
    positions = of.counted[row].nonzero().flatten()
    at = int(positions[len(positions) // 2])
    changed = _changed(of, row, at)
    calls = [partial(_outputs, of=of, tokens=tokens) for tokens in (of.tokens, of.tokens, changed)]
    outputs = call_again(training, calls)
    if isinstance(outputs, str):
        return Causality(problem=outputs)
    base, repeated, other = ([each[row] for each in several] for several in outputs)
    results = [_compare_outputs(each, positions, at) for each in zip(base, repeated, other, strict=True)]
    if not results:
        return Causality(problem="no output has the positions of the input")
    return Causality(
        min(each.ahead for each in results),
        all(each.looks_ahead for each in results),
        all(each.is_causal for each in results),
    )


@preserve_python_and_numpy()
def call_again(training: Training, calls: Sequence[Callable[[nn.Module], list[Tensor]]]) -> list[list[Tensor]] | str:
    """Call functions with a copy of the model in evaluation mode. Return their results, or why the model cannot be called.

    The copy shares the parameters and has no hooks. It has its own buffers and attributes, and the random state is restored. Other
    processes do not repeat the call, so the model must not communicate with them.
    """
    model = training.model
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if any(is_sharded(parameter) for parameter in model.parameters()):
        return "its parameters are sharded"
    devices = sorted({each.device.index for each in model.parameters() if each.is_cuda})
    try:
        copied = copy_modules(model, share_parameters=True)
        for part in copied.values():
            part.training = False
        outputs = []
        for call in calls:
            with torch.no_grad(), preserve_python_and_numpy(), torch.random.fork_rng(devices), _Isolated():
                outputs.append(call(copied[model]))
    # The model's own code, which can raise anything when it is called again.
    except Exception as error:
        return f"the model cannot be called again: {type(error).__name__}: {error}"[:200]
    return outputs


def _compare_outputs(logits: tuple[Tensor, Tensor, Tensor], positions: Tensor, at: int) -> Causality:
    """Compare the logits [positions, classes] of a call, of the same call, and of one with another token at a position."""
    base, repeated, other = logits
    where = torch.zeros(len(base), dtype=torch.bool)
    where[positions] = True
    where = where.to(base.device)
    scale = float(base.abs().amax()) or 1.0
    noise = float((repeated - base).abs().amax())
    change = (other - base).abs().amax(1)
    sides = (change[:at], where[:at]), (change[at + 1 :], where[at + 1 :])
    ahead, back = (float(part[kept].max()) if kept.any() else 0.0 for part, kept in sides)
    limit = max(10 * noise, TOLERANCE.get(base.dtype, 1e-2) * scale)
    return Causality(ahead / scale, ahead > limit, back > limit >= ahead)


class _Isolated(TorchDispatchMode):
    """Raises an exception at a collective operation, for which this process would wait. Restores the generators that are used."""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._states: dict[torch.Generator, Tensor] = {}

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        for generator, state in self._states.items():
            generator.set_state(state)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return false: PyTorch would import the compiler, which is slow, to exclude the method below from compilation."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "c10d" in getattr(func, "namespace", ""):
            raise RuntimeError(f"it communicates with other processes ({func})")
        for each in (*args, *(kwargs or {}).values()):
            if isinstance(each, torch.Generator) and each not in self._states:
                self._states[each] = each.get_state()
        return func(*args, **(kwargs or {}))


def _changed(of: TokenTargets, row: int, at: int) -> Tensor:
    """Return the tokens with another one at a position of a sample. It is one of the targets.

    The other samples are the same: experts with a capacity share it between the samples of a batch.
    """
    changed = of.tokens.clone()
    changed[row, at] = of.targets[of.counted & (of.targets != changed[row, at])][0]
    return changed


def _outputs(model: nn.Module, of: TokenTargets, tokens: Tensor) -> list[Tensor]:
    """Call the model with other tokens. Return its logits [samples, positions, classes], or the first output of that shape."""
    given = of.call.tensors[of.path]
    new = (tokens.T if of.is_time_first else tokens).to(given.device, given.dtype).contiguous()
    result = call_with(model, of.call, given, new)
    outputs = [logits for _, tensor in iter_tensors(result) if (logits := _logits(tensor, of)) is not None]
    return [each for each in outputs if each.shape[2] == of.loss.shape[1]] or outputs[:1]


def call_with(model: nn.Module, call: ModelCall, given: Tensor | None, new: Tensor | None, **added: Tensor) -> Any:
    """Call a model with the arguments of a call. One tensor is replaced, and named ones are added or replaced."""

    def copy_tensor(_: str, tensor: Tensor) -> Tensor:
        return new if tensor is given and new is not None else tensor.detach().clone()

    arguments = copy_arguments({"args": call.args, "kwargs": dict(call.kwargs)}, copy_tensor)
    return model(*arguments["args"], **{**arguments["kwargs"], **added})


def _logits(tensor: Tensor, of: TokenTargets) -> Tensor | None:
    samples, length = of.tokens.shape
    shape = (length, samples) if of.is_time_first else (samples, length)
    if not tensor.is_floating_point():
        return None
    if tensor.ndim == 2 and tensor.shape[0] == samples * length:
        tensor = tensor.view(*shape, -1)
    if tensor.ndim != 3:
        return None
    if tensor.shape[:2] == shape:
        return tensor.transpose(0, 1) if of.is_time_first else tensor
    return tensor.transpose(1, 2) if (tensor.shape[0], tensor.shape[2]) == shape else None
