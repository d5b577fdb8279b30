"""The messages of validation errors, in the words of this package instead of those of pydantic."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

TARGET = "{_target_: package.name, argument: value}"
"""The notation of a target, for messages."""

_MESSAGES = {
    "missing": "is missing",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "too_short": "must not be empty",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "model_type": "must be a mapping",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be an integer"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
}


def message_of(item: Mapping[str, Any]) -> str:
    """Return what is wrong with a value, to follow its key: `must be an integer`."""
    text: str = _MESSAGES.get(item["type"], item["msg"])
    return re.sub(r"^(?:Input|String) should ", "must ", text.removeprefix("Value error, "))


class UnknownNameError(ValueError):
    """A name that is not in a fixed set. It carries the set, so that the message can suggest similar names."""

    def __init__(self, what: str, name: str, allowed: tuple[str, ...]) -> None:
        self.what, self.name, self.allowed = what, name, allowed
        super().__init__(f"unknown {what} {name!r}")


def is_misspelled(name: str, options: Sequence[str]) -> bool:
    """Return whether a name that can be chosen freely is probably a misspelled one of these options.

    A name that contains an option, such as `loss_2` for `loss`, is not a misspelling.
    """
    return not any(each in name for each in options) and bool(difflib.get_close_matches(name, options, 1, 0.85))
