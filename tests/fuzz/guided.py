"""`python -m tests.fuzz.guided TARGET --minutes N`: coverage-guided inputs for one decoder.

Owns the run of atheris over a target of targets.py. Its finds are files in the corpus' folder;
`make test` reads every file there again, without atheris.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    """Run; ends with atheris' own exit code: 0 when nothing was found in the time."""
    try:
        import atheris
    except ImportError:
        sys.exit("atheris is not installed: pip install atheris (Linux, CPython 3.11 to 3.13)")
    # Only code of the project tells coverage: with all that is loaded a start takes a minute.
    with atheris.instrument_imports(include=["malamute_protocol", "malamute_py"]):
        from tests.fuzz.targets import TARGETS
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.guided", description=__doc__)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of atheris; 0: a new one")
    given = parser.parse_args()
    target = TARGETS[given.target]
    kept = CORPUS / given.target
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="malamute-guided-") as folder:
        for number, seed in enumerate(target.seeds()):
            (Path(folder) / f"seed-{number}").write_bytes(seed)
        atheris.Setup(
            [
                "guided", f"-max_total_time={max(1, round(given.minutes * 60))}",
                f"-seed={given.seed}", f"-artifact_prefix={kept}/", "-max_len=8192",
                "-rss_limit_mb=2048", "-timeout=20", "-print_final_stats=1", folder, str(kept),
            ],
            target.read,
        )  # fmt: skip
        atheris.Fuzz()


if __name__ == "__main__":
    main()
