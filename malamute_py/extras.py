"""Optional parts of the distribution: which extra brings a package that is missing.

Owns the table from an import name to the extra of pyproject.toml that installs it. The rule: the
client needs no extra; a part that needs one says which, and how to install it, when the import
fails. A test compares the table with pyproject.toml.
"""

from __future__ import annotations

from typing import Final

EXTRAS: Final[dict[str, str]] = {
    "cramjam": "codecs",
    "jinja2": "http",
    "lz4": "codecs",
    "markupsafe": "http",
    "opentelemetry": "otel",
    "prometheus_client": "http",
    "pyarrow": "arrow",
    "pyroaring": "server",
    "pyspark": "spark",
    "re2": "server",
    "rich": "cli",
    "starlette": "http",
    "structlog": "server",
    "textual": "cli",
    "tomlkit": "server",
    "typer": "cli",
    "uvicorn": "http",
    "zstandard": "codecs",
}
"""Import name of a package -> the extra that installs it."""


def missing(error: ModuleNotFoundError, what: str) -> str | None:
    """Return a sentence that says how to install what a failed import needed.

    what: the part that was wanted, as the subject of the sentence: "the broker". Returns None when
    no extra of this distribution brings the module.
    """
    package = (error.name or "").partition(".")[0]
    extra = EXTRAS.get(package)
    if extra is None:
        return None
    return f"{what} needs the package {package}: pip install 'malamute-py[{extra}]'"
