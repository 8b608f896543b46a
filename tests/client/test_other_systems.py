"""The client on macOS and Windows: calls that these systems lack are hidden from it.

The rule: a program runs in a process without them. It shows that nothing of Linux is needed; it is
no test of macOS or Windows themselves.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

import malamute_py as malamute
from malamute_py import EmbeddedBroker
from malamute_py.client.engine.bell import READABLE, Bell, Poller, Selecting, poller

NOT_ON_WINDOWS = """\
import os, select, signal, sys
# Libraries look for the system themselves.
import asyncio, google_crc32c, msgspec, numpy, zmq.utils.monitor
for name in ("fcntl", "grp", "pty", "pwd", "resource", "syslog", "termios", "tty"):
    sys.modules[name] = None
for module, names in {
    os: "fork forkpty getuid geteuid getgid O_CLOEXEC O_NONBLOCK memfd_create pipe2 posix_fadvise"
        " posix_fallocate pread pwrite pwritev preadv register_at_fork sched_getaffinity"
        " sched_setaffinity sched_yield setsid statvfs sysconf uname",
    select: "epoll poll",
    signal: "SIGALRM SIGHUP SIGKILL SIGUSR1 SIGUSR2 pthread_sigmask setitimer sigwait",
}.items():
    for name in names.split():
        delattr(module, name)
"""
THREADS = """\
import malamute_py as malamute
for name in malamute.__all__:
    name == "EmbeddedBroker" or getattr(malamute, name)
with malamute.connect_sync(sys.argv[1]) as client:
    client.publish_many("trades", [b"1", b"2"], codec="gzip")
    client.publish("trades", b"3")
    print([r.body for r in client.subscribe("trades", start="earliest", until="tail")])
    client.send("crew", b"gate")
    with client.inbox("crew") as inbox:
        print(inbox.next(timeout_ms=10_000).body)
"""
TASKS = """\
import asyncio
import malamute_py as malamute

class Loop(asyncio.SelectorEventLoop):
    def add_signal_handler(self, *_):
        raise NotImplementedError
    remove_signal_handler = add_signal_handler

async def main():
    async with malamute.connect(sys.argv[1]) as client:
        await client.publish("tasks", b"1")
        @client.serve("stop")
        async def stop(request):
            signal.raise_signal(signal.SIGTERM)
            return b"stopping"
        working = asyncio.create_task(client.run(signals=True))
        print((await client.request("stop", b"")).body)
        await working

with asyncio.Runner(loop_factory=lambda: Loop(__import__("selectors").SelectSelector())) as runner:
    runner.run(main())
print("done")
"""


def run(program: str, *arguments: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-c", NOT_ON_WINDOWS + program, *arguments],
        check=False, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.slow
def test_a_client_in_threads_needs_no_call_that_windows_lacks() -> None:
    with EmbeddedBroker(tcp=True) as broker:
        assert run(THREADS, broker.tcp_endpoint) == "[b'1', b'2', b'3']\nb'gate'\n"


@pytest.mark.slow
def test_a_client_in_an_event_loop_needs_no_call_that_windows_lacks() -> None:
    with EmbeddedBroker(tcp=True) as broker:
        assert run(TASKS, broker.tcp_endpoint) == "b'stopping'\ndone\n"


async def test_a_loop_that_watches_no_descriptors_is_refused_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(type(loop), "add_reader", asyncio.AbstractEventLoop.add_reader)
    with pytest.raises(RuntimeError, match=r"loop_factory=asyncio\.SelectorEventLoop"):
        await malamute.connect("tcp://127.0.0.1:1", wait=False)


@pytest.mark.parametrize("pipes", [True, False])
@pytest.mark.parametrize("make", [poller, Selecting])
def test_a_bell_wakes_a_sleeping_thread(
    monkeypatch: pytest.MonkeyPatch, make: type[Poller], pipes: bool
) -> None:
    if not pipes:
        monkeypatch.delattr("os.pipe2")
    bell, waiting = Bell(), make()
    waiting.register(bell.descriptor, READABLE)
    assert waiting.poll(0) == []
    bell.ring()
    bell.ring()
    assert waiting.poll(None) == [(bell.descriptor, READABLE)]
    bell.silence()
    assert waiting.poll(1) == []
    with pytest.raises(BlockingIOError):
        bell.silence()
    waiting.unregister(bell.descriptor)
    with pytest.raises(KeyError):
        waiting.unregister(bell.descriptor)
    bell.close()
