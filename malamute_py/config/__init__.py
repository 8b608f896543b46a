"""The broker's configuration: every key, its default and what it may be.

`load` reads one, and `Config` is what it returns. The rule: an unknown key is an error that names
the nearest one, and is never ignored. Source: deploy/malamute.toml explains each key (a test
compares the two).
"""

from malamute_py.config.combinations import faults_of_users, wrong_in_combination
from malamute_py.config.keys import (
    ENVIRONMENT_PREFIX,
    KEYS,
    QUOTAS,
    key_of_variable,
    path_of_override,
    put,
)
from malamute_py.config.loading import (
    from_table,
    load,
    parse_value,
    read_file,
    read_override,
    typed,
)
from malamute_py.config.sections import (
    PUBLIC_WORDS,
    Authentication,
    CheckpointSection,
    Config,
    Denied,
    Grant,
    JournalSection,
    LimitsSection,
    LinksSection,
    LogSection,
    LoopSection,
    NamedVerbs,
    Names,
    NamespaceSection,
    QuotasSection,
)

__all__ = [
    "ENVIRONMENT_PREFIX",
    "KEYS",
    "PUBLIC_WORDS",
    "QUOTAS",
    "Authentication",
    "CheckpointSection",
    "Config",
    "Denied",
    "Grant",
    "JournalSection",
    "LimitsSection",
    "LinksSection",
    "LogSection",
    "LoopSection",
    "NamedVerbs",
    "Names",
    "NamespaceSection",
    "QuotasSection",
    "faults_of_users",
    "from_table",
    "key_of_variable",
    "load",
    "parse_value",
    "path_of_override",
    "put",
    "read_file",
    "read_override",
    "typed",
    "wrong_in_combination",
]
