"""A users file that is likely not meant: what a reload refuses of it, and what it warns of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.server.test_reloading import ANN, BOB, USERS, world


@pytest.mark.moderate
def test_a_reload_warns_of_a_pattern_that_fits_no_name(tmp_path: Path) -> None:
    with world(tmp_path) as made, made.peer("root", "a") as root:
        more = '[permissions."*".deny]\nread = ["salaries.#"]\n'
        made.write(USERS.format(ann=ANN, bob=BOB) + more)
        made.reload(root)
        [told] = made.lines.of("permission_doubted")
        assert told["key"] == "permissions.*.deny.read"
        assert "fits no name" in told["reason"]


@pytest.mark.moderate
def test_a_users_file_that_was_cut_short_shuts_nobody_out(tmp_path: Path) -> None:
    with world(tmp_path) as made, made.peer("root", "a") as root:
        for empty in ("", " \n"):
            made.write(empty)
            told = made.reload(root)
            assert list(told) == ["authentication.users_file"]
            assert told["authentication.users_file"].startswith("refused")
            assert "is empty" in told["authentication.users_file"]
        with made.peer("ann", "a"):
            pass
        assert made.lines.of("nobody_may_connect") == []
        made.write("# none\n")
        made.reload(root)
        [told] = made.lines.of("nobody_may_connect")
        assert told["reason"] == "nobody may connect: no user has a password"
