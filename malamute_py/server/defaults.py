"""Settings of what first use creates, checked at the start.

Owns the check that the tables `default` of the configuration are settings at all. The rule: a wrong
setting stops the start by its key, rather than refusing each first use later. Source:
config/sections.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from malamute_protocol.errors import BrokerRefused
from malamute_py.changelog.settings import (
    MailboxSettings,
    ServiceSettings,
    queue_settings,
    settings_of,
)
from malamute_py.config import Config
from malamute_py.sections import ConfigError


def check_defaults(config: Config) -> None:
    """Raise ConfigError when a table `default` of the configuration is wrong.

    For a start, a reload and a check of the configuration. Those of a namespace are checked as they
    count: over those of the broker.
    """
    of_all = config.streams.default, config.mailboxes.default, config.services.default
    _check(("streams.default", "mailboxes.default", "services.default"), of_all, config)
    for name, own in config.namespaces.items():
        of_it = own.default_stream, own.default_mailbox, own.default_service
        keys = [f"namespaces.{name}.default_{kind}" for kind in ("stream", "mailbox", "service")]
        _check(
            keys, [{**common, **more} for common, more in zip(of_all, of_it, strict=True)], config
        )


def _check(keys: Sequence[str], tables: Sequence[dict[str, Any]], config: Config) -> None:
    """Check the tables `default` of a stream, a mailbox and a service, each under its key.

    Raises ConfigError with the key of a table that the core would refuse as settings.
    """
    bytes_max = config.streams.settings_bytes_max
    stream, mailbox, service = tables
    checks: list[Callable[[], object]] = [
        partial(settings_of, stream, bytes_max),
        partial(queue_settings, MailboxSettings, mailbox, bytes_max, over=None),
        partial(queue_settings, ServiceSettings, service, bytes_max, over=None),
    ]
    for key, check in zip(keys, checks, strict=True):
        try:
            check()
        except BrokerRefused as error:
            raise ConfigError(key, error.reason) from None
