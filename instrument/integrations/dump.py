"""`instrument.dump`: writes the inputs and outputs of modules to a folder, for comparison with another implementation.

This file requires only torch (2.0 or later). Copy it into any environment, such as that of an inference engine:

    from dump import Dump, dump

    dump(model, batch, "**", out="dumps/port")

A folder has one file per forward pass of the model: `pass-000000.safetensors`, or `.pt` without the package safetensors. The name
of a tensor is `LAYER:ROLE.PATH#CALL`, such as `layers.0.mlp:output` or `layers.0:input.hidden_states`; the path and call 0 are
left out if empty. `:batch.input_ids` and the like are the ids of the batch. The metadata entry `instrument` is JSON with `order`
(names in the order of execution), `types` (classes of modules), `skipped` (tensors that were not written) and `torch`.
"""

from __future__ import annotations

import copy
import inspect
import json
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

IDS = {
    "input_ids": ("input_ids", "tokens", "token_ids", "ids", "idx"),
    "position_ids": ("position_ids", "positions", "pos"),
    "attention_mask": ("attention_mask", "padding_mask", "mask"),
    "samples": ("samples", "sample_ids"),
}
"""The ids of a batch, and the arguments of models that contain them."""


class Dump:
    """Writes the inputs and outputs of modules during forward passes of a model.

        with Dump(model, "**", out="dumps/engine") as dump:
            model.generate(...)

    Args:
        model: The model. Each of its forward passes is one step of the comparison.
        layers: Pattern of module names, or several. `*` is one segment or a part of it, `**` is any number of segments, `.` is the root.
        out: The folder, which must not contain a dump. Each process requires another folder.
        ids: The ids of the batch, which align the tokens of two dumps: `input_ids`, `position_ids`, `attention_mask` (0 for
            padding), integers or booleans of shape [batch, tokens] or [tokens], and `samples`, integers of shape [batch] or
            [tokens]. Those that are missing are read from the arguments of the model. If they change, assign `dump.ids` before each pass.

    Raises:
        ValueError: The patterns match no module, or a name of `ids` is unknown.
        FileExistsError: The folder contains a dump, or another process writes to it.
    """

    def __init__(
        self, model: nn.Module, layers: Any = "**", *, out: Any, ids: Mapping[str, Tensor] | None = None
    ) -> None:
        pattern = re.compile("|".join(map(_expression, [layers] if isinstance(layers, str) else layers)) or "(?!)")
        known = dict(model.named_modules())
        self._modules = {name: each for name, each in known.items() if pattern.fullmatch(f"{name}." if name else "")}
        if not self._modules:
            raise ValueError(f"layers: {layers!r} matches no module; the modules are {[*known]}")
        self.out, self.ids = Path(out), dict(ids or {})
        if unknown := [*(self.ids.keys() - IDS.keys())]:
            raise ValueError(f"ids: {unknown[0]!r} is unknown; the names are {[*IDS]}")
        if any(self.out.glob("pass-*")):
            raise FileExistsError(f"out: {self.out} contains a dump; delete it, or write to another folder")
        self.out.mkdir(parents=True, exist_ok=True)
        self._model, self._handles = model, []  # type: nn.Module, list[Any]
        self._pass = 0
        self._calls: dict[str, int] = {}
        self._tensors: dict[str, Tensor] = {}
        self._skipped: dict[str, str] = {}

    def __enter__(self) -> Dump:
        self._handles = [self._model.register_forward_pre_hook(self._start, with_kwargs=True)]
        for name, module in self._modules.items():
            self._handles += [
                module.register_forward_pre_hook(self._hook(name, "input"), with_kwargs=True),
                module.register_forward_hook(self._hook(name, "output")),
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
        given = _arguments(model, args, kwargs)
        for name, known in IDS.items():
            ids = next((given[each] for each in known if each in given), None)
            ids = torch.as_tensor(self.ids[name]) if name in self.ids else ids
            if isinstance(ids, Tensor) and ids.dim() <= 2:  # a mask of attention weights has 4 dimensions
                self._keep(f":batch.{name}", ids)

    def _hook(self, name: str, role: str) -> Any:
        def hook(module: nn.Module, args: Any, value: Any) -> None:
            if role == "input":
                self._calls[name] = self._calls.get(name, -1) + 1
                value = _arguments(module, args, value)
            call = f"#{self._calls[name]}" if self._calls[name] else ""
            for path, tensor in _tensors(value, ""):
                self._keep(f"{name}:{role}{path}{call}", tensor)

        return hook

    def _keep(self, key: str, tensor: Tensor) -> None:
        try:
            self._tensors[key] = tensor.detach().to("cpu", copy=True).contiguous()
            self._tensors[key].view(-1)
        except (RuntimeError, NotImplementedError, TypeError) as error:  # a sparse, nested or quantized tensor
            self._tensors.pop(key, None)
            self._skipped[key] = str(error).partition("\n")[0]

    def _write(self) -> None:
        if not self._tensors:
            return
        types = {name: type(module).__name__ for name, module in self._modules.items()}
        about = {"order": [*self._tensors], "types": types, "skipped": self._skipped, "torch": str(torch.__version__)}
        metadata = {"format": "pt", "instrument": json.dumps(about)}
        file = self.out / f"pass-{self._pass:06d}.safetensors"
        try:
            from safetensors.torch import save_file

            file.touch(exist_ok=False)  # raises an error if another process writes to this folder
            save_file(self._tensors, file, metadata)
        except (ImportError, KeyError):  # safetensors is not installed, or does not have a dtype
            file.unlink(missing_ok=True)
            with file.with_suffix(".pt").open("xb") as opened:
                torch.save({"tensors": self._tensors, "metadata": metadata}, opened)
        self._pass, self._calls, self._tensors, self._skipped = self._pass + 1, {}, {}, {}


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
    random_state = torch.get_rng_state()
    _run(model, batch, Dump(model, layers, out=out, ids=ids))
    if float64:
        exact = copy.deepcopy(model).double()
        try:
            with torch.random.fork_rng():
                torch.set_rng_state(random_state)  # of dropout
                batch = tree_map(_double, dict(batch) if isinstance(batch, Mapping) else batch)
                _run(exact, batch, Dump(exact, layers, out=Path(out) / "float64", ids=ids))
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


def _double(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def _arguments(module: nn.Module, args: Any, kwargs: Any) -> dict[str, Any]:
    try:
        signature = inspect.signature(module.forward)
        given = dict(signature.bind(*args, **kwargs).arguments)
    except (TypeError, ValueError):
        return {**{str(index): value for index, value in enumerate(args)}, **kwargs}
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            given.update(given.pop(name, {}))
    return given


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a nested value, with the keys and indices that lead to each, such as `.hidden_states.0`."""
    if isinstance(value, Tensor):
        yield path, value
    elif isinstance(value, (Mapping, tuple, list)):
        for key, each in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(each, f"{path}.{key}")


def _expression(glob: str) -> str:
    """Return the regular expression of a pattern of names, of which each segment ends with a dot."""
    segments = [] if glob == "." else glob.split(".")
    texts = (r"(?:[^.]+\.)*" if s == "**" else re.escape(s).replace(r"\*", "[^.]*") + r"\." for s in segments)
    return f"(?:{''.join(texts)})"
