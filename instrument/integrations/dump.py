"""`instrument.dump`: writes the inputs and outputs of modules to a folder, for comparison with another implementation.

This file requires only torch (2.0 or later). Copy it into any environment, such as that of an inference engine:

    from dump import Dump, dump

    dump(model, batch, "**", out="dumps/port")

A folder has one file per forward pass of the model: `pass-000000-000.safetensors`, or `.pt` without the package
safetensors. The name
of a tensor is `LAYER:ROLE.PATH#CALL`, such as `layers.0.mlp:output` or `layers.0:input.hidden_states`; the path and call 0 are
left out if empty. `:batch.input_ids` and the like are the ids of the batch. The metadata entry `instrument` is JSON with `order`
(names in the order of execution), `same` (tensors with the bytes of an earlier one), `types` (classes) and `skipped`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

IDS = {
    "input_ids": ("input_ids", "tokens", "idx"),
    "position_ids": ("position_ids", "positions"),
    "attention_mask": ("attention_mask", "padding_mask"),
    "samples": ("samples", "sample_ids"),
}
"""The ids of a batch, and the arguments of models that contain them."""
FILE_BYTES = 2**31  # of a file, after which the pass continues in another one


class Dump:
    """Writes the inputs and outputs of modules during forward passes of a model.

        with Dump(model, "**", out="dumps/engine") as dump:
            model.generate(...)

    Args:
        model: The model. Each of its forward passes is one step of the comparison.
        layers: Pattern of module names, or several. `*` is one segment or a part of it, `**` is any number of segments, `.` is the root.
        out: The folder, which must not contain a dump.
        ids: The ids of the batch, which align the tokens of two dumps: `input_ids`, `position_ids`, `attention_mask` (0 for
            padding), integers or booleans of shape [batch, tokens] or [tokens], and `samples`, integers of shape [batch] or
            [tokens]. Those that are missing are read from the arguments of the model. If they change, assign `dump.ids` before each pass.

    Raises:
        ValueError: The patterns match no module.
        FileExistsError: The folder contains a dump.
    """

    def __init__(
        self, model: nn.Module, layers: Any = "**", *, out: Any, ids: Mapping[str, Tensor] | None = None
    ) -> None:
        patterns = [_pattern(each) for each in ([layers] if isinstance(layers, str) else layers)]
        names = {
            name: module for name, module in model.named_modules() if any(p.fullmatch(_dotted(name)) for p in patterns)
        }
        if not names:
            raise ValueError(
                f"layers: {layers!r} matches no module; the modules are {[n for n, _ in model.named_modules()]}"
            )
        self.out, self.ids = Path(out), dict(ids or {})
        if any(self.out.glob("pass-*")):
            raise FileExistsError(f"out: {self.out} contains a dump; delete it, or write to another folder")
        self.out.mkdir(parents=True, exist_ok=True)
        self._model, self._modules, self._handles = model, names, []  # type: nn.Module, dict[str, nn.Module], list[Any]
        self._pass, self._file = 0, 0
        self._digests: dict[str, str] = {}
        self._calls: dict[str, int] = {}
        self._clear()

    def __enter__(self) -> Dump:
        self._handles = [self._model.register_forward_pre_hook(self._start, with_kwargs=True)]
        for name, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(self._inputs(name), with_kwargs=True),
                module.register_forward_hook(self._outputs(name)),
            ]
        return self

    def __exit__(self, error: Any, *_: Any) -> None:
        for handle in self._handles:
            handle.remove()
        if error is None:  # the tensors of a pass that failed are incomplete
            self._write()

    def add(self, name: str, tensor: Tensor) -> None:
        """Write another tensor of the current pass, such as `logprobs` of shape [batch, tokens]."""
        self._keep(f"{name}:output", tensor)

    def _start(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        self._write()
        if self._file:
            self._pass, self._file = self._pass + 1, 0
        self._digests, self._calls = {}, {}
        given = _arguments(model, args, kwargs)
        for name, known in IDS.items():
            found = [self.ids[name]] if name in self.ids else [given[each] for each in known if each in given]
            if (
                found and isinstance(found[0], Tensor) and found[0].dim() <= 2
            ):  # a mask of attention weights has 4 dimensions
                self._keep(f":batch.{name}", found[0])

    def _inputs(self, name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            self._calls[name] = self._calls.get(name, -1) + 1
            self._keep_all(name, "input", _arguments(module, args, kwargs))

        return hook

    def _outputs(self, name: str) -> Any:
        def hook(module: nn.Module, _: Any, output: Any) -> None:
            self._types[name] = type(module).__name__
            self._keep_all(name, "output", output)

        return hook

    def _keep_all(self, name: str, role: str, value: Any) -> None:
        call = self._calls[name]
        for path, tensor in _tensors(value, ""):
            self._keep(f"{name}:{role}" + (f".{path}" if path else "") + (f"#{call}" if call else ""), tensor)

    def _keep(self, key: str, tensor: Tensor) -> None:
        """Copy a tensor. A tensor with the same bytes as an earlier one of the pass is only named."""
        try:
            kept = tensor.detach().to("cpu", copy=True).contiguous()
            content = kept.reshape(-1).view(torch.uint8).numpy()
        except (RuntimeError, NotImplementedError, TypeError) as error:  # a sparse, nested or quantized tensor
            self._skipped[key] = str(error).partition("\n")[0]
            return
        digest = hashlib.blake2b(f"{kept.dtype}{tuple(kept.shape)}".encode() + content.tobytes()).hexdigest()
        self._order.append(key)
        if digest in self._digests:
            self._same[key] = self._digests[digest]
            return
        self._digests[digest] = key
        self._tensors[key] = kept
        self._bytes += content.nbytes
        if self._bytes >= FILE_BYTES:
            self._write()

    def _clear(self) -> None:
        self._bytes = 0
        self._tensors: dict[str, Tensor] = {}
        self._order: list[str] = []
        self._same: dict[str, str] = {}
        self._types: dict[str, str] = {}
        self._skipped: dict[str, str] = {}

    def _write(self) -> None:
        if not self._order:
            return
        about = {"order": self._order, "same": self._same, "types": self._types, "skipped": self._skipped}
        metadata = {"format": "pt", "instrument": json.dumps({**about, "torch": str(torch.__version__)})}
        file = self.out / f"pass-{self._pass:06d}-{self._file:03d}"
        try:
            from safetensors.torch import save_file
        except ImportError:
            torch.save({"tensors": self._tensors, "metadata": metadata}, f"{file}.pt")
        else:
            save_file(self._tensors, f"{file}.safetensors", metadata)
        self._file += 1
        self._clear()


def dump(
    model: nn.Module,
    batch: Any,
    layers: Any = "**",
    *,
    out: Any,
    ids: Mapping[str, Tensor] | None = None,
    float64: bool = False,
) -> Path:
    """Run one forward pass without gradients, and write the inputs and outputs of modules. See `Dump` for the other arguments.

    Args:
        model: The model, in the mode in which it is compared: usually `model.eval()`.
        batch: The arguments: a mapping of keyword arguments, a tuple or list, or a single argument.
        float64: Whether a copy of the model also runs in float64, into `out/float64`: `instrument.diff` measures the
            rounding errors of the model with it. A model that does not run in float64 causes a warning.

    Returns:
        The folder.
    """
    _run(model, batch, Dump(model, layers, out=out, ids=ids))
    if float64:
        exact = copy.deepcopy(model).double()
        try:
            with torch.random.fork_rng():
                _run(exact, _double(batch), Dump(exact, layers, out=Path(out) / "float64", ids=ids))
        except (RuntimeError, TypeError) as error:
            text = str(error).partition("\n")[0]
            warnings.warn(f"the model does not run in float64, so its rounding is not measured: {text}", stacklevel=2)
    return Path(out)


def _run(model: nn.Module, batch: Any, recording: Dump) -> None:
    with torch.no_grad(), recording:
        if isinstance(batch, Mapping):
            model(**batch)
        else:
            model(*(batch if isinstance(batch, (tuple, list)) else (batch,)))


def _arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    try:
        bound = inspect.signature(module.forward).bind(*args, **kwargs)
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    given = dict(bound.arguments)
    for name, parameter in inspect.signature(module.forward).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value, with the keys and indices that lead to each."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _tensors(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (tuple, list)):
        for index, each in enumerate(value):
            yield from _tensors(each, f"{path}.{index}" if path else str(index))


def _double(value: Any) -> Any:
    """Return a nested value with floating-point tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, Mapping):
        return {key: _double(each) for key, each in value.items()}
    return type(value)(map(_double, value)) if isinstance(value, (tuple, list)) else value


def _dotted(name: str) -> str:
    return f"{name}." if name else ""


def _pattern(glob: str) -> re.Pattern[str]:
    segments = [] if glob == "." else glob.split(".")
    return re.compile(
        "".join(r"(?:[^.]+\.)*" if s == "**" else re.escape(s).replace(r"\*", "[^.]*") + r"\." for s in segments)
    )
