"""Settings: the example file, overrides in their order, and errors that name the key."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from malamute_py import EmbeddedBroker
from malamute_py.broker import BrokerSettings
from malamute_py.broker.limits import no_reload
from malamute_py.config import KEYS, Config, from_table, load
from malamute_py.sections import ConfigError, parse_bind
from malamute_py.server.core_settings import core_settings

EXAMPLE = Path(__file__).parents[2] / "deploy" / "malamute.toml"


def keys_of(table: dict[str, Any], prefix: str = "") -> set[str]:
    found: set[str] = set()
    for name, value in table.items():
        key = prefix + name
        if isinstance(value, dict) and key not in KEYS:
            found |= keys_of(value, key + ".")
        else:
            found.add(key)
    return found


def test_the_example_names_every_key_with_its_default() -> None:
    assert load(EXAMPLE) == Config()
    assert keys_of(tomllib.loads(EXAMPLE.read_text())) == set(KEYS)


SHELL_OWN = {
    "validates",
    "software",
    "permit",
    "subjects",
    "allows_some",
    "known",
    "reload",
    "in_force",
    "quota",
    "carrier",
    "facts",
    "users",
    "namespace_of",
    "meter",
}
"""Settings of the core that are the shell's own: no configuration names them."""


def test_each_key_reaches_the_setting_of_the_core_whose_default_it_has() -> None:
    given, own = core_settings(Config(), no_reload, dict, dict), BrokerSettings()
    for name in set(BrokerSettings.__struct_fields__) - SHELL_OWN:
        assert getattr(given, name) == getattr(own, name), name


def test_a_key_is_the_setting_of_its_name_only_in_its_section() -> None:
    given = load(
        overrides={
            "streams.streams_max": "7", "memory.reads_max": "3", "services.offers_max": "4",
            "mailboxes.reads_max": "5", "links.queries_max": "9",
        }
    )  # fmt: skip
    settings = core_settings(given, no_reload, dict, dict)
    assert (settings.streams_max, settings.reads_max, settings.offers_max) == (7, 3, 4)
    assert (settings.mail_reads_max, settings.link_queries_max) == (5, 9)
    assert settings.queries_max == BrokerSettings().queries_max


def test_variables_override_the_file_and_the_command_line_overrides_both(tmp_path: Path) -> None:
    file = tmp_path / "malamute.toml"
    file.write_text(
        'data_directory = "a"\n[journal]\nring_bytes = 1_000_000_000\n[log]\nlevel = "error"'
    )
    config = load(
        file,
        environment={"MALAMUTE_JOURNAL_RING_BYTES": "2_000_000_000", "MALAMUTE_LOG_LEVEL": "debug"},
        overrides={"log.level": "warning", "listen": "tcp://127.0.0.1:0, inproc://x"},
    )
    assert config.data_directory == "a"
    assert config.journal.ring_bytes == 2_000_000_000
    assert config.log.level == "warning"
    assert config.listen == ["tcp://127.0.0.1:0", "inproc://x"]


def test_a_number_of_bytes_may_have_its_unit_on_the_command_line() -> None:
    config = load(
        None,
        environment={"MALAMUTE_LIMITS_RECORD_BYTES_MAX": "2 mib"},
        overrides={"journal.ring_bytes": "5GiB"},
    )
    assert config.journal.ring_bytes == 5 << 30
    assert config.limits.record_bytes_max == 2 << 20
    for key, text, says in (
        ("journal.ring_bytes", "5s", "write for instance 4096, 64MiB or 1GiB"),
        ("links.heartbeat_ms", "5MiB", "write a number and its unit: 500ms"),
        ("loop.turn_us", "0.5us", "no whole number of us"),
        ("journal.ring_bytes", "-1", ">= 1"),
        ("links.links_max", "many", "neither a number"),
    ):
        with pytest.raises(ConfigError, match=says):
            load(None, overrides={key: text})


def test_sizes_and_times_of_a_file_may_have_their_unit_wherever_they_stand() -> None:
    config = from_table(
        {
            "journal": {"ring_bytes": "5GiB", "segment_bytes": 67_108_864},
            "links": {"heartbeat_ms": "2s", "replica_grace_ms": "0"},
            "loop": {"turn_us": "20ms"},
            "mailboxes": {"default": {"ttl_ms": "1h30m", "max_messages": 5}},
            "streams": {"default": {"description": "5s", "max_bytes": "1.5GB"}},
            "quotas": {"identities": {"web_ms": {"publish_bytes_s": "20MB", "links": 3}}},
            "authentication": {"users": {"ann_ms": "5s"}},
        }
    )
    assert (config.journal.ring_bytes, config.journal.segment_bytes) == (5 << 30, 64 << 20)
    assert (config.links.heartbeat_ms, config.links.replica_grace_ms) == (2_000, 0)
    assert config.loop.turn_us == 20_000
    assert config.mailboxes.default == {"ttl_ms": 5_400_000, "max_messages": 5}
    assert config.streams.default == {"description": "5s", "max_bytes": 1_500_000_000}
    assert config.quotas.identities == {"web_ms": {"publish_bytes_s": 20_000_000, "links": 3}}
    assert config.authentication.users == {"ann_ms": "5s"}


@pytest.mark.parametrize(
    ("table", "key", "hint"),
    [
        ({"journal": {"ringbytes": 1}}, "journal.ringbytes", "journal.ring_bytes"),
        ({"ring_bytes": 1}, "ring_bytes", "journal.ring_bytes"),
        ({"jornal": {}}, "jornal", "did you mean journal?"),
        ({"streams": {"max_age_ms": 5}}, "streams.max_age_ms", "streams.default.max_age_ms?"),
        ({"mailboxes": {"ttl_ms": 5}}, "mailboxes.ttl_ms", "mailboxes.default.ttl_ms?"),
        (
            {"broker": {"port": 1}},
            "broker",
            "authentication, checkpoint, groups, http, journal, limits, links, log, loop",
        ),
        ({"limits": {"max_links": 5}}, "limits.max_links", "did you mean links.links_max?"),
        ({"limits": {"max_record_size": 5}}, "limits.max_record_size", "limits.record_bytes_max?"),
        ({"limits": {"hot_bytes": 5}}, "limits.hot_bytes", "did you mean memory.hot_bytes?"),
        ({"limits": {"max_clients": 5}}, "limits.max_clients", "[limits] has record_bytes_max,"),
        ({"broker": {"port": 1}}, "broker", "outside them stand data_directory, listen"),
        ({"log": {"zzz": 1}}, "log.zzz", "[log] has level, form"),
        ({"permissions": {"a": {"reed": []}}}, "permissions", "did you mean read?"),
        ({"journal": {"full": "maybe"}}, "journal.full", "overwrite, refuse"),
        ({"journal": {"ring_bytes": "4 Gib/s"}}, "journal.ring_bytes", "4096, 64MiB or 1GiB"),
        ({"links": {"links_max": "4GiB"}}, "links.links_max", "`int`"),
        ({"listen": "tcp://127.0.0.1:1"}, "listen", 'a list: ["...", "..."]'),
        ({"listen": []}, "listen", "at least one"),
        ({"log": 3}, "log", "[log]"),
        ({"limits": {"keys_max": 0}}, "limits.keys_max", ">= 1"),
        ({"streams": {"settings_bytes_max": "1MiB"}}, "streams.settings_bytes_max", "<= 262144"),
        ({"journal": {"segment_bytes": 65536}}, "journal.segment_bytes", "two batches"),
        ({"journal": {"ring_bytes": 1 << 20}}, "journal.ring_bytes", "three segments"),
        ({"checkpoint": {"force_percent": 95}}, "checkpoint.force_percent", "pressure_percent"),
        ({"links": {"heartbeat_ms": 1}}, "links.heartbeat_ms", "heartbeat_min_ms"),
        ({"http": {"bind": "9798"}}, "http.bind", "write 127.0.0.1:9798"),
        ({"http": {"bind": "127.0.0.1:65536"}}, "http.bind", "write 127.0.0.1:9798"),
        ({"http": {"bind": "0.0.0.0:9798"}}, "http.bind", "set http.token_file"),
        ({"http": {"bind": "[::]:9798"}}, "http.bind", "set http.token_file"),
        ({"http": {"bind": "some-host:9798"}}, "http.bind", "set http.token_file"),
        ({"authentication": {"mechanism": "plain"}}, "authentication.users", "users_file"),
        ({"authentication": {"mechanism": "curve"}}, "authentication.clients", "public key"),
    ],
)
def test_a_bad_setting_is_named_with_what_to_write(
    table: dict[str, Any], key: str, hint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        from_table(table)
    assert caught.value.key == key
    assert hint in caught.value.why


@pytest.mark.parametrize(
    ("bind", "parts"),
    [
        ("127.0.0.1:9798", ("127.0.0.1", 9798, False)),
        ("[::1]:0", ("::1", 0, False)),
        ("localhost:1", ("localhost", 1, False)),
        ("10.0.0.1:1", ("10.0.0.1", 1, True)),
    ],
)
def test_an_address_for_http_is_taken_apart(bind: str, parts: tuple[str, int, bool]) -> None:
    assert parse_bind(bind) == parts


def test_a_misspelt_variable_of_a_section_is_refused_and_others_pass() -> None:
    load(environment={"MALAMUTE_CONTEXT": "office", "HOME": "anything"})
    with pytest.raises(ConfigError, match="MALAMUTE_JOURNAL_RING_BYTES"):
        load(environment={"MALAMUTE_JOURNAL_RING_BYTE": "1"})


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load(tmp_path / "none.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("listen = [")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load(broken)


@pytest.mark.parametrize(
    "text",
    ["[broker]\nport = 1", "[log]\nlevle = 1", "[log]\nlevel = 1", "[permissions.a]\nreed = []"],
)
def test_what_a_file_has_wrong_is_laid_to_the_file(text: str, tmp_path: Path) -> None:
    file = tmp_path / "office.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"office\.toml"):
        load(file, overrides={"log.form": "json"})
    with pytest.raises(ConfigError) as caught:
        load(overrides={"broker.port": "1"})
    assert "office" not in str(caught.value)


def test_an_override_of_a_wrong_type_or_name_is_named() -> None:
    with pytest.raises(ConfigError, match=r"links\.ipv6"):
        load(overrides={"links.ipv6": "yes"})
    with pytest.raises(ConfigError, match=r"did you mean links\.links_max"):
        load(overrides={"links.link_max": "5"})


@pytest.mark.parametrize(
    ("table", "key"),
    [
        ({"services": {"backoff_max_ms": 10}}, "services.backoff_ms"),
        ({"groups": {"hold_max_ms": 10}}, "groups.hold_ms"),
        ({"checkpoint": {"retry_max_ms": 10}}, "checkpoint.retry_ms"),
    ],
)
def test_a_first_value_above_its_bound_is_refused(table: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=f"^{key}: .* is more than {key[:-3]}_max_ms"):
        from_table(table)


@pytest.mark.parametrize(
    ("section", "values", "why"),
    [
        ("streams", {"max_byte": 1}, "max_byte"),
        ("mailboxes", {"max_messages": -1}, "max_messages"),
        ("services", {"attempts_max": "five"}, "attempts_max"),
    ],
)
def test_settings_of_first_use_are_checked_at_the_start(
    section: str, values: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=f"^{section}.default: .*{why}"):
        EmbeddedBroker(None, **{f"{section}__default": values}).start()  # type: ignore[arg-type]
