"""Errors of modules that may not be loaded yet.

Owns the question whether an error is of a class that only some commands load. The rule:
asking loads nothing: an error's class exists only if its module was loaded.
"""

from __future__ import annotations

import sys


def is_config_error(error: BaseException) -> bool:
    """Whether it is a ConfigError of the broker's configuration or a client's SettingError.

    A command that ends by one has the exit code of wrong usage.
    """
    return any(
        isinstance(error, getattr(module, name))
        for name, home in (
            ("ConfigError", "malamute_py.sections"),
            ("SettingError", "malamute_py.client.settings"),
        )
        if (module := sys.modules.get(home)) is not None
    )
