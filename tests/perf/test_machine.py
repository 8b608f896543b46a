"""Where figures were taken: which commits a recording may be of."""

from __future__ import annotations

import subprocess
from pathlib import Path

from perf.suite.machine import same_code


def commit(root: Path, **files: str) -> str:
    """The id of a new commit in which these files (`_` for `/`) have these words."""
    for name, words in files.items():
        path = root / name.replace("_", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(words)
    as_somebody = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    for step in (("init", "-q"), ("add", "-A"), (*as_somebody, "commit", "-q", "-m", "more")):
        subprocess.run(("git", "-C", str(root), *step), check=True)
    told = subprocess.run(
        ("git", "-C", str(root), "rev-parse", "HEAD"), check=True, capture_output=True, text=True
    )
    return told.stdout.strip()


def test_what_tells_the_figures_may_differ(tmp_path: Path) -> None:
    first = commit(
        tmp_path, **{"perf_suite_works.py": "a\n", "README.md": "a", "broker_core.py": "a"}
    )
    later = commit(tmp_path, **{"perf_suite_works.py": "a\nb", "README.md": "b", "tests_a.py": "b"})
    assert same_code(tmp_path, first, later)


def test_what_is_measured_or_measures_may_not(tmp_path: Path) -> None:
    first = commit(tmp_path, **{"perf_suite_measure.py": "a", "broker_core.py": "a"})
    product = commit(tmp_path, **{"broker_core.py": "b"})
    measure = commit(tmp_path, **{"perf_suite_measure.py": "b"})
    assert not same_code(tmp_path, first, product)
    assert not same_code(tmp_path, product, measure)
    assert not same_code(tmp_path, first, "unknown")


def test_works_may_come_but_those_there_are_stay_as_they_were(tmp_path: Path) -> None:
    first = commit(tmp_path, **{"perf_suite_works.py": "one\ntwo\n"})
    more = commit(tmp_path, **{"perf_suite_works.py": "one\ntwo\nthree\n"})
    other = commit(tmp_path, **{"perf_suite_works.py": "one\n2\nthree\n"})
    assert same_code(tmp_path, first, more)
    assert not same_code(tmp_path, more, other)
