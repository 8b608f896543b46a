"""The broker's process as the demo, perf/ and the tests start it; see promises/daemon.py."""

from malamute_py.promises.daemon import Daemon, DaemonFailed

__all__ = ["Daemon", "DaemonFailed"]
