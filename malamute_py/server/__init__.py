"""The shell of the broker core: sockets, clock, journal threads, loop."""

from malamute_py.server.errors import ServerFailed, StartError
from malamute_py.server.server import Server

__all__ = ["Server", "ServerFailed", "StartError"]
