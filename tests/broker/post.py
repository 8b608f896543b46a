"""The fake shell as senders and recipients of mail use it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malamute_protocol import commands as wire
from malamute_protocol.encode import encode
from tests.broker.shell import Letter, Peer, Shell


class Post(Shell):
    """A broker whose links are `anna` (1), `bert` (2) and `carla` (3)."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._trackers = 100
        self.connect()

    def connect(self) -> None:
        """Connect the three, as after a restart."""
        for link, identity in enumerate(("anna", "bert", "carla"), 1):
            self.hello(link, identity=identity)

    def restart(self, *, power_loss: bool = False) -> None:
        super().restart(power_loss=power_loss)
        self.connect()

    def mail(
        self, link: int, mailbox: str, bodies: Sequence[bytes], *, level: int = 0,
        key: bytes = b"", deliver_at_ms: int = 0, priority: int = 0, tracker: int = -1,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Send a batch; the answer, or None when there is none yet."""
        options.setdefault("subject", "s")
        if tracker < 0:
            self._trackers += 1
            tracker = self._trackers
        command = wire.Send(mailbox, tracker, level, key, deliver_at_ms, priority)
        self.send(link, command, frames=[encode(bodies, **options)])
        return self.answer(link, tracker)

    def answer(self, link: int, tracker: int) -> Any:
        """CONFIRM or REFUSED of a tracker."""
        for command in reversed(self.peers[link].commands):
            if isinstance(command, wire.Confirm) and command.tracker == tracker:
                return command
            if isinstance(command, wire.Refused) and command.reference == tracker:
                return command
        return None

    def inbox(
        self, link: int, number: int = 7, mailbox: str = "", *, records: int = 1 << 40,
        size: int = 1 << 50, **settings: Any,
    ) -> Peer:  # fmt: skip
        return self.send(link, wire.OpenInbox(number, mailbox, records, size, settings))

    def credit(self, link: int, number: int, records: int, size: int) -> None:
        self.send(link, wire.Credit(number, records, size))

    def ack(
        self, link: int, *ranges: tuple[int, int], number: int = 7, again_ms: int = -1,
        level: int = 0,
    ) -> Any:  # fmt: skip
        self._trackers += 1
        self.send(link, wire.AckMail(number, list(ranges), self._trackers, level, again_ms))
        return self.answer(link, self._trackers)

    def ask(self, link: int, kind: type[wire.Command], *fields: Any, **named: Any) -> Any:
        """The value of a RESULT, or the REFUSED."""
        self._trackers += 1
        request = self._trackers
        peer = self.send(link, kind(request, *fields, **named))
        for command in reversed(peer.commands):
            if isinstance(command, wire.Result) and command.request == request:
                return command.value
            if isinstance(command, wire.Refused) and command.reference == request:
                return command
        return None

    def info(self, mailbox: str) -> Any:
        return self.ask(1, wire.MailboxInfo, mailbox)

    def letters(self, link: int, number: int = 7) -> list[Letter]:
        return self.peers[link].mail.get(number, [])

    def got(self, link: int, number: int = 7) -> list[bytes]:
        """Bodies that an inbox received, in order."""
        return [letter.body for letter in self.letters(link, number)]

    def numbers(self, link: int, number: int = 7) -> list[int]:
        return [letter.number for letter in self.letters(link, number)]

    def lose(self, link: int) -> None:
        """The transport loses a link."""
        self.broker.link_lost(link, self.now_ms)
        self.run()

    def told(self, name: str) -> list[dict[str, Any]]:
        """Facts of the events of a name."""
        return [event.facts for event in self.events if event.name == name]

    def count(self, name: str) -> int:
        return self.broker.counters[name]


def code(answer: Any) -> str:
    """Return the code of a REFUSED, or the name of another answer."""
    return answer.code if isinstance(answer, wire.Refused) else type(answer).__name__
