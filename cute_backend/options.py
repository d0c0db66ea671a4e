"""Settings of `cute_backend.config` for one compilation: their names and the values that they accept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cute_backend import config
from cute_backend.errors import UsageError

PREFIX = "cute_backend."
"""The prefix by which the options of `torch.compile` name settings of this package."""


def split_options(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The settings of this package among the options of `torch.compile`, without PREFIX, and all others.

    As in Inductor's options, a hyphen stands for an underscore. Raises UsageError as `check_settings` does.
    """
    settings, others = {}, {}
    for option, value in options.items():
        name = option.replace("-", "_")
        if name.startswith(PREFIX):
            settings[name.removeprefix(PREFIX)] = value
        else:
            others[option] = value
    check_settings(settings)
    return settings, others


def check_settings(settings: Mapping[str, Any]) -> None:
    """Raises UsageError for a name that is not a setting, and for a value that a setting does not accept."""
    for name, value in settings.items():
        if name not in _names():
            raise UsageError(config._complaint(name))  # type: ignore[attr-defined]
        config.check_value(name, value, f"cute_backend's setting {name}")


def _names() -> list[str]:
    return [name for name in config._config if not name.startswith("_")]  # type: ignore[attr-defined]
