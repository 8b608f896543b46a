"""Listening sockets: endpoints, the options of each, and binding.

Owns which endpoints are allowed and how a ROUTER socket is set up. The rule: every option whose
default is wrong for a daemon is set here, and a public address without authentication is refused
unless the operator said so in words. Source: docs/design.md (The core and its shell; Safety);
zmq_setsockopt(3).
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
import stat

import msgspec
import zmq

from malamute_py.config import PUBLIC_WORDS, Config
from malamute_py.sections import ConfigError
from malamute_py.server.authentication.authenticator import ZAP_DOMAIN, Authenticator
from malamute_py.server.connections.descriptors import backlog
from malamute_py.server.connections.listening import ASIDE
from malamute_py.server.connections.numbering import Numbering, seed_libzmq
from malamute_py.server.errors import StartError

_FRAME_BYTES = 2
"""Bytes that a short frame takes on the wire beyond its body: flags and length."""
_CURVE_FRAME_BYTES = 35
"""Bytes of a frame beyond its body with CURVE: `MESSAGE`, a nonce and a box around it (RFC 26)."""


class Endpoint(msgspec.Struct, frozen=True):
    """One address to listen on, taken apart."""

    text: str
    transport: str
    host: str
    """Host, interface or `*` of tcp; path of ipc; name of inproc."""
    port: str = ""

    @property
    def is_public(self) -> bool:
        """Whether another machine may reach the endpoint."""
        if self.transport != "tcp":
            return False
        if self.host in {"localhost", "lo"}:
            return False
        try:
            return not ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return True  # A wildcard, an interface or a host name: assume the worst.


def parse_endpoint(text: str) -> Endpoint:
    """Read an endpoint of the setting `listen`; raises ConfigError for one that is none."""
    transport, separator, rest = text.partition("://")
    if not separator or transport not in {"tcp", "ipc", "inproc"} or not rest:
        raise ConfigError(
            "listen",
            f"{text!r} is not an endpoint; write tcp://127.0.0.1:9797, ipc:///run/malamute.sock "
            "or inproc://name",
        )
    if transport != "tcp":
        return Endpoint(text, transport, rest)
    host, separator, port = rest.rpartition(":")  # an address of IPv6 has colons, too
    if not separator or not host:
        raise ConfigError("listen", f"{text!r} has no port; write for instance {text}:9797")
    if port != "*" and not (port.isascii() and port.isdigit() and int(port) < 65536):
        raise ConfigError("listen", f"{text!r}: the port {port!r} is not a number below 65536")
    if port == "0":
        port = "*"  # The form in which libzmq wants "any free port".
    host = host.removeprefix("[").removesuffix("]")
    return Endpoint(text, transport, host, port)


def check_public(endpoints: list[Endpoint], config: Config) -> None:
    """Raise ConfigError when other machines can reach an endpoint and nothing is asked of them.

    PUBLIC_WORDS, the value of a setting, are the operator's word that it is meant so.
    """
    if config.authentication.mechanism != "none":
        return
    public = [endpoint.text for endpoint in endpoints if endpoint.is_public]
    if public and config.listen_public_without_authentication != PUBLIC_WORDS:
        raise ConfigError(
            "listen",
            f"{', '.join(public)} can be reached from other machines and authentication.mechanism "
            'is "none"; set it to "curve" or "plain", or listen on 127.0.0.1, or say in the '
            f'configuration: listen_public_without_authentication = "{PUBLIC_WORDS}"',
        )


class Listener:
    """One bound ROUTER socket."""

    __slots__ = (
        "authenticated",
        "endpoint",
        "frame_bytes",
        "monitor",
        "name",
        "numbering",
        "socket",
    )

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        config: Config,
        authenticator: Authenticator | None,
    ) -> None:
        """Set up and bind the socket; raises StartError when the address cannot be had.

        authenticator: None: the broker asks for no credentials. Routing ids that a peer could guess
        would let it abort the broker (numbering.py): seed_libzmq() has them begin anywhere, and a
        Numbering watches them.
        """
        self.endpoint = endpoint
        self.authenticated = authenticator is not None and _is_guarded(endpoint, config)
        encrypted = self.authenticated and config.authentication.mechanism == "curve"
        # Bytes per frame are what the guard compares with those that the kernel counted.
        self.frame_bytes = _CURVE_FRAME_BYTES if encrypted else _FRAME_BYTES
        """Bytes that a frame takes on the wire beyond its body."""
        seed_libzmq()
        self.socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self.monitor: zmq.Socket[bytes] | None = None
        self.numbering: Numbering | None = None
        try:
            self._set_options(config)
            if self.authenticated and authenticator is not None:
                # libzmq asks the authenticator about each connection, and lets none in unasked.
                self.socket.zap_domain = ZAP_DOMAIN
                self.socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
                authenticator.protect(self.socket)
            if endpoint.transport != "inproc":
                # Before the bind, so that no connection is accepted unseen.
                self.monitor = self.socket.get_monitor_socket(
                    zmq.EVENT_LISTENING
                    | zmq.EVENT_ACCEPTED
                    | zmq.EVENT_ACCEPT_FAILED
                    | zmq.EVENT_DISCONNECTED
                    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
                    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
                    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
                )
                self.monitor.setsockopt(zmq.RCVHWM, 0)  # no event is dropped
                self.numbering = Numbering(context, self.socket)
            self._bind()
            if endpoint.transport == "ipc" and not self.authenticated:
                _check_socket_file(endpoint, config)
        except BaseException:
            self.close(0)
            raise
        self.name = bytes(self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    @property
    def is_local(self) -> bool:
        """Whether its peers come over ipc."""
        return self.endpoint.transport == "ipc"

    def _set_options(self, config: Config) -> None:
        """Set the bounds, waits and checks of the socket before it is bound."""
        links, limits = config.links, config.limits
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)  # the limit of open files in force
        options = {
            # This bounds one frame; the guard bounds what endless MORE frames add up to.
            zmq.MAXMSGSIZE: max(limits.batch_bytes_max, limits.command_frame_bytes_max),
            zmq.HANDSHAKE_IVL: links.handshake_ms,
            # libzmq 4.3.5 aborts when a connection breaks whose queue of received messages was
            # full: its heartbeat, or a PING of the peer's after what did not fit, writes to it. So
            # there is no heartbeat of libzmq, and that queue (RCVHWM) has no bound: the guard
            # counts bytes instead.
            zmq.HEARTBEAT_IVL: 0,
            zmq.RCVHWM: 0,
            # Closing waits for no peer: the loop has waited before, as long as it may.
            zmq.LINGER: 0,
            zmq.BACKLOG: backlog(links.backlog, files),
            zmq.SNDHWM: links.send_messages_max,
            # A message to a peer that is gone, or whose queue is full, is an error and not dropped.
            zmq.ROUTER_MANDATORY: 1,
            # With ROUTER_HANDOVER, a peer that claims another's id would be sent what is the
            # other's.
            zmq.ROUTER_HANDOVER: 0,
            # Messages are queued for completed connections only.
            zmq.IMMEDIATE: 1,
            # For a machine that vanished: the protocol's heartbeat ends its link, this its
            # connection, after keepalive_ms of silence and as long with three questions.
            zmq.TCP_KEEPALIVE: 1,
            zmq.TCP_KEEPALIVE_IDLE: max(1, links.keepalive_ms // 1000),
            zmq.TCP_KEEPALIVE_INTVL: max(1, links.keepalive_ms // 3000),
            zmq.TCP_KEEPALIVE_CNT: 3,
            zmq.IPV6: int(":" in self.endpoint.host or links.ipv6),
        }
        for option, value in options.items():
            self.socket.setsockopt(option, value)

    def _bind(self) -> None:
        """Bind the socket. Raises StartError, with what to do about it."""
        endpoint = self.endpoint
        if endpoint.transport == "ipc":
            # Files that a killed broker left, one of them renamed while it kept local peers out.
            _clear_stale_socket_file(endpoint, endpoint.host)
            _clear_stale_socket_file(endpoint, endpoint.host + ASIDE)
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        address = endpoint.text if endpoint.transport != "tcp" else f"tcp://{host}:{endpoint.port}"
        try:
            self.socket.bind(address)
        except zmq.ZMQError as error:
            raise _bind_error(endpoint, error) from None

    def close(self, linger_ms: int) -> None:
        """Stop listening; give queued messages linger_ms to leave."""
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.monitor = None
        if self.numbering is not None:
            self.numbering.close()
        self.socket.close(linger_ms)


def _is_guarded(endpoint: Endpoint, config: Config) -> bool:
    """Whether an endpoint asks for credentials, where the broker has a mechanism for them."""
    if endpoint.transport == "inproc":
        return False  # The peer is in the same process, and libzmq makes no handshake there.
    return not (endpoint.transport == "ipc" and config.authentication.ipc_without)


def _clear_stale_socket_file(endpoint: Endpoint, path: str) -> None:
    """Remove the socket file that a dead broker left; raises StartError when a process answers.

    libzmq itself would bind over any socket file, a live broker's included, and take its clients
    away. path: the file's name, or the one that it has while local peers are kept out.
    """
    if path.startswith(("@", "*")):
        return  # an abstract name, or one that libzmq makes up: there is no file
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise StartError(str(error), endpoint.text, "choose another path") from None
    if not stat.S_ISSOCK(mode):
        raise StartError(
            "a file that is not a socket has this name", endpoint.text, "choose another path"
        )
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            return
        except OSError as error:
            raise StartError(
                f"the socket file cannot be used ({error.strerror})",
                endpoint.text,
                "choose another path or remove the file",
            ) from None
    raise StartError(
        "another process listens there",
        endpoint.text,
        "stop it (ss -xlp names it), or listen elsewhere: malamute broker --listen ENDPOINT",
    )


def _check_socket_file(endpoint: Endpoint, config: Config) -> None:
    """Raise StartError when other users could connect, or could put a socket in its place.

    Called for an ipc endpoint without authentication, once it is bound: file modes alone say who
    may connect, unless the operator said that all may (PUBLIC_WORDS).
    """
    path = endpoint.host
    if path.startswith("@") or path == "*":
        return
    if config.listen_public_without_authentication == PUBLIC_WORDS:
        return
    mode = stat.S_IMODE(os.stat(path).st_mode)
    if mode & 0o002:  # every user may write it, and so connect
        raise StartError(
            f"the socket file has mode {mode:04o}: every user of this machine can connect, and "
            "nothing is asked of them",
            endpoint.text,
            "start the broker with umask 077 or 007, or set authentication.mechanism",
        )
    directory = os.path.dirname(path) or "."
    around = stat.S_IMODE(os.stat(directory).st_mode)
    # With the sticky bit, only its owner may replace a file.
    if around & 0o002 and not around & stat.S_ISVTX:
        raise StartError(
            f"the directory of the socket file has mode {around:04o}: every user of this machine "
            "can put a socket of his in its place",
            endpoint.text,
            f"type: chmod o-w {directory}",
        )


def _bind_error(endpoint: Endpoint, error: zmq.ZMQError) -> StartError:
    """Return the StartError for an address that could not be bound: what to do about it."""
    elsewhere = "listen elsewhere: malamute broker --listen ENDPOINT (port 0 takes a free one)"
    if error.errno == errno.EADDRINUSE:
        return StartError(
            "the address is in use",
            endpoint.text,
            f"another broker may run already (ss -tlnp names the process); stop it, or {elsewhere}",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return StartError("this machine has no such address", endpoint.text, elsewhere)
    if error.errno == errno.ENODEV:
        return StartError("no such network interface", endpoint.text, elsewhere)
    if error.errno == errno.EACCES:
        return StartError(
            "no permission to listen there",
            endpoint.text,
            "ports below 1024 need a privilege, a socket file needs a writable directory; "
            + elsewhere,
        )
    if error.errno == errno.ENAMETOOLONG:
        return StartError("the path is too long for a socket", endpoint.text, "use a shorter one")
    return StartError(f"cannot listen ({error})", endpoint.text, elsewhere)
