"""Errors of the clients of remote folders: messages without credentials, and which errors are permanent."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping

from ..errors import first_line

CREDENTIALS = "set credentials in the environment (AWS_ACCESS_KEY_ID, AWS_PROFILE, ...) or in the fsspec configuration"
NO_CREDENTIALS = (
    "NoCredentialsError",
    "PartialCredentialsError",
    "DefaultCredentialsError",
    "ClientAuthenticationError",
)
MAX_LETTERS = 300  # of a message
MIN_SECRET_LENGTH = 6  # The minimum length of a secret; shorter strings also occur in ordinary words.
IS_SECRET = re.compile(
    r"secret|token|passw|credential|access_key|account_key|api_key|connection_string|^key$", re.IGNORECASE
)


def safe_message(error: Exception) -> str:
    """Return the first line of an error message without credentials.

    Removed are the credentials of endpoint addresses, query strings, and all values that the environment or the fsspec
    configuration names as secrets.
    """
    return f"{type(error).__name__}: {without_secrets(first_line(error))}"[:MAX_LETTERS]


def without_secrets(text: str) -> str:
    """Replace all known credentials in a text."""
    for secret in sorted(_secrets(), key=len, reverse=True):
        text = text.replace(secret, "***")
    return re.sub(r"\?[^\s\"']*=[^\s\"']*", "?***", re.sub(r"//([^/@\s\"']*|[^@\s\"']*:[^@\s\"']*)@", "//", text))


def _secrets() -> set[str]:
    """Return the values of settings with secret names, in the environment and in the fsspec configuration."""
    secrets = {value for name, value in os.environ.items() if IS_SECRET.search(name)}
    if (fsspec := sys.modules.get("fsspec")) is not None:
        settings = [*fsspec.config.conf.items()]
        while settings:
            name, value = settings.pop()
            if isinstance(value, Mapping):
                settings += value.items()
            elif IS_SECRET.search(str(name)):
                secrets.add(str(value))
    return {secret for secret in secrets if len(secret) >= MIN_SECRET_LENGTH}


def permanent_error_hint(error: Exception) -> str | None:
    """Return how to fix an error that is permanent; None if the error may be temporary."""
    name, code = type(error).__name__, str(getattr(error, "code", ""))
    if name in ("PermissionError", *NO_CREDENTIALS) or code in ("401", "403") or "Forbidden" in str(error):
        return CREDENTIALS
    return {"FileNotFoundError": "use an existing bucket or container", "UploadError": "use another address"}.get(name)
