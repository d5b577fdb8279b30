"""The weights that `init_from` loads before the first step.

A file is loaded before `apply` changes the model, because it has the names and shapes of the unchanged model. Weights of
a run are loaded after `apply`, because the run saved them after its own `apply`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, Problem, first_line, raise_problems, similar_names
from ..formatting import shorten
from ..storage.run_record import CHECKPOINTS, WEIGHTS, checkpoint_steps, read_record
from ..values.dtensor import join_shards

WHERE = "init_from"
CONTAINERS = ("state_dict", "model_state_dict", "model")  # keys under which training scripts save a state dict
MAX_NAMES = 8  # maximum number of names in a message


class InitialWeights:
    """The weights in a file, or in the folder of a run.

    Raises:
        ConfigError: The file does not exist or contains no state dict, or the run has no weights.
    """

    def __init__(self, path: str, *, strict: bool) -> None:
        self.path = path
        self.strict = strict
        self.is_of_run = Path(path).is_dir()
        files = _files_of_run(Path(path)) if self.is_of_run else [Path(path)]
        states = [state for file in files if (state := _state_dict(file)) is not None]
        if not states:
            message = "the checkpoint contains no weights, since the run had mode: forward"
            raise ConfigError(Problem(WHERE, message, given=path))
        self._state: Mapping[str, Any] = states[0] if len(files) == 1 else join_shards(states)
        # With `strict: false`, the names in the model without a value, and the names in the file that the model lacks.
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        digest = hashlib.sha256()
        for file in files:
            with open(file, "rb", buffering=0) as opened:
                hashlib.file_digest(opened, lambda: digest)
        self.sha256 = digest.hexdigest()  # of all files in order if a checkpoint has several

    def load(self, model: nn.Module) -> None:
        """Load the weights into a model. Names are compared without the prefixes of wrappers (`module.`, `_orig_mod.`)."""
        own = model.state_dict()
        by_plain_name = {_plain_name(name): name for name in own}
        self._state = {
            name if name in own else by_plain_name.get(_plain_name(name), _plain_name(name)): value
            for name, value in self._state.items()
        }
        if not self._state.keys() & own.keys():
            message = "no name in the state dict is a name in the model"
            names = shorten([*self._state], MAX_NAMES)
            raise ConfigError(Problem(WHERE, message, given=names, allowed=shorten([*own], MAX_NAMES)))
        problems: list[Problem] = []
        try:
            missing, unexpected = map(sorted, model.load_state_dict(self._state, strict=False))
        except RuntimeError as error:
            problems = [Problem(WHERE, str(error).strip(), given=self.path)]
            missing, unexpected = sorted(own.keys() - self._state.keys()), sorted(self._state.keys() - own.keys())
        if self.strict:
            loaded = {_address(own[name]) for name in own.keys() & self._state.keys()}
            missing = [name for name in missing if name not in own or _address(own[name]) not in loaded]  # tied
            problems += _name_problems("the state dict lacks names of the model", missing, unexpected)
            problems += _name_problems("the state dict has names that the model lacks", unexpected, missing)
        else:
            self.missing, self.unexpected = missing, unexpected
        raise_problems(problems)
        self._state = {}  # releases the weights

    @property
    def ignored(self) -> str | None:
        """A message about the names that were ignored; None without any."""
        texts = {
            "init_from has no values for {}; they keep their initial values": self.missing,
            "init_from ignored names that the model lacks: {}": self.unexpected,
        }
        return "; ".join(text.format(shorten(names, MAX_NAMES)) for text, names in texts.items() if names) or None

    def entry(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("path", "sha256", "missing", "unexpected")}


def _files_of_run(folder: Path) -> list[Path]:
    """Return the file of the final weights of a run, or else the files of its latest checkpoint."""
    read_record(folder, WHERE)
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if not (steps := checkpoint_steps(folder)):
        message = f"the run saved no weights: no {WEIGHTS} (train.save) and no checkpoint (train.checkpoint.every)"
        raise ConfigError(Problem(WHERE, message, given=str(folder)))
    return sorted(
        (folder / CHECKPOINTS).glob(f"step-{steps[-1]:08d}*.pt"), key=lambda file: (len(file.name), file.name)
    )


def _state_dict(file: Path) -> Mapping[str, Any] | None:
    content = _content(file)
    if isinstance(content, Mapping):
        if "version" in content and "batches" in content and "model" not in content:
            return None
        inner = (content[key] for key in CONTAINERS if isinstance(content.get(key), Mapping))
        state: Mapping[str, Any] = next(inner, content)
        has_names = all(isinstance(name, str) for name in state)
        if has_names and any(isinstance(value, Tensor | Mapping) for value in state.values()):
            return state
    names = shorten([*map(str, content)], MAX_NAMES) if isinstance(content, Mapping) else type(content).__name__
    allowed = f"a state dict: tensors by name, also under one of the keys {', '.join(CONTAINERS)}"
    raise ConfigError(Problem(WHERE, f"{file} contains no state dict", given=names, allowed=allowed))


def _content(file: Path) -> Any:
    try:
        if file.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(file)
        return torch.load(file, weights_only=True, map_location="cpu")
    except ImportError:
        message = "reading .safetensors files requires the package safetensors"
        raise ConfigError(Problem(WHERE, message, given=str(file), fix="pip install safetensors")) from None
    except FileNotFoundError:
        raise ConfigError(Problem(WHERE, "the file does not exist", given=str(file))) from None
    except Exception as error:  # Both libraries raise many types of exceptions for a damaged file.
        reason = first_line(error).partition(". ")[0]
        message = f"the file cannot be read with weights_only=True: {type(error).__name__}: {reason}"
        allowed = "a .pt, .pth or .safetensors file with a state dict, or the folder of a run"
        fix = "save the weights with torch.save(model.state_dict(), FILE)"
        raise ConfigError(Problem(WHERE, message, str(file), allowed, fix=fix)) from None


def _plain_name(name: str) -> str:
    segments = [segment for segment in name.split(".") if segment != "_orig_mod"]
    while segments[:1] == ["module"] and len(segments) > 1:
        segments = segments[1:]
    return ".".join(segments)


def _name_problems(message: str, names: Sequence[str], others: Sequence[str]) -> Iterator[Problem]:
    """Yield one problem with all names, and the most similar names of the other side."""
    if names:
        similar = dict.fromkeys(like for name in names[:MAX_NAMES] for like in similar_names(name, others, limit=1))
        fix = "set init_from.strict=false to ignore the differences"
        yield Problem(WHERE, f"{message}: {shorten(names, MAX_NAMES)}", similar=[*similar], fix=fix)


def _address(tensor: Any) -> object:
    """Return what identifies the memory of a tensor; tied parameters share it."""
    return (tensor.data_ptr(), tensor.shape) if isinstance(tensor, Tensor) and tensor.numel() else id(tensor)
