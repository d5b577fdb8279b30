"""What clients of remote folders fail with: told without credentials, and whether it may pass."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

CREDENTIALS = "credentials in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, ...) or in fsspec's own configuration"
NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
)
SHORTEST = 6  # letters of a secret: a shorter one would be found in words that are none
_IS_SECRET = re.compile(
    r"secret|token|passw|credential|access_key|account_key|api_key|connection_string|^key$", re.IGNORECASE
)


def told(error: Exception, most: int = 300) -> str:
    """What went wrong, in a line, without credentials: those of an endpoint's address, what an address asks for, and whatever
    the environment or fsspec's own configuration calls a secret."""
    text = without_secrets(str(error).strip().partition("\n")[0])
    return f"{type(error).__name__}: {text}"[:most]


def without_secrets(text: str) -> str:
    """A text in which none of the known credentials is."""
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"\?[^\s\"']*=[^\s\"']*", "?***", re.sub(r"//([^/@\s\"']*|[^@\s\"']*:[^@\s\"']*)@", "//", text))


def _secrets() -> set[str]:
    """The values of settings whose names say that they are secret, in the environment and for fsspec."""
    found = {value for name, value in os.environ.items() if _IS_SECRET.search(name)}
    if (fsspec := sys.modules.get("fsspec")) is not None:
        settings = [*fsspec.config.conf.items()]
        while settings:
            name, value = settings.pop()
            if isinstance(value, Mapping):
                settings += value.items()
            elif _IS_SECRET.search(str(name)):
                found.add(str(value))
    return {secret for secret in found if len(secret) >= SHORTEST}


def refusal(error: Exception) -> str | None:
    """What is allowed in place of an address that is not, whatever one waits for; None of an error that may pass."""
    name, code = type(error).__name__, str(getattr(error, "code", ""))
    if name in ("PermissionError", *NO_CREDENTIALS) or code in ("401", "403") or "Forbidden" in str(error):
        return CREDENTIALS
    return {"FileNotFoundError": "a bucket, or a container, that exists", "UploadError": "another address"}.get(name)
