"""Settings of what first use creates, checked at the start.

Owns the check that the tables `default` of the configuration are settings at all. The rule: a wrong
setting stops the start by its key, rather than refusing each first use later. Source: config.py.
"""

from __future__ import annotations

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
    """Raise ConfigError when a table `default` of the configuration is wrong."""
    bytes_max = config.streams.settings_bytes_max
    key = "streams.default"
    try:
        settings_of(config.streams.default, bytes_max)
        key = "mailboxes.default"
        queue_settings(MailboxSettings, config.mailboxes.default, bytes_max, None)
        key = "services.default"
        queue_settings(ServiceSettings, config.services.default, bytes_max, None)
    except BrokerRefused as error:
        raise ConfigError(key, error.reason) from None
