"""Programs over the real synchronous client, each in a process of its own, with real threads.

Owns the use that threads make of the client library; the knowledge and duties of a program are
those of process.py. Each role is a thread, and all threads of a process share one client. Source:
README.md; the docstrings of malamute_py.client.sync.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from functools import partial
from typing import Any

from malamute_protocol.errors import BrokerRefused, ConnectionLost, MalamuteError, Timeout
from malamute_py.client.sync.client import SyncClient
from tests.simulation.acts import Act, Wish
from tests.simulation.model import Violation
from tests.simulation.process import LEVELS, Process, Told, serial_of
from tests.simulation.programs import (
    FAILS,
    GIVES_BACK,
    LATE,
    MEMORY_NUMBERS,
    Deliberate,
    judge,
    reckoned,
    sends_in_step,
    shown,
)
from tests.simulation.sockets import Context
from tests.simulation.threads import SimulatedThread, Threads, sleep
from tests.simulation.work_model import is_durable


class ThreadedProcess(Process):
    """One program with threads."""

    client: Any
    loop: Threads

    # --- life ------------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.loop = Threads(
            lambda: self.world.clock.now_us, self.after, lambda: self.draw_us(1, 40), self.chance,
            self._thread_failed,
        )  # fmt: skip
        self.spawn(self._main_thread, "main")

    def spawn(self, target: Callable[..., Any], name: str, *args: Any) -> SimulatedThread:
        """Begin a thread."""
        return self.loop.spawn(target, name, *args)

    def _thread_failed(self, thread: SimulatedThread, error: BaseException) -> None:
        self.world.fail(f"{self.name}, thread {thread.name}", error)

    def _main_thread(self) -> None:
        self.client = SyncClient(self.settings(), context=Context(self))  # type: ignore[arg-type]
        self.client.opened(timeout_ms=None)
        for name, *details in self.serves:
            self.spawn(ROLES[name](*details), name, self)
        for name, *details in self.asks:
            self.spawn(partial(self._ask, ROLES[name](*details)), name)
        self.requests -= 1

    def _ask(self, role: Callable[[ThreadedProcess], None]) -> None:
        role(self)
        self.requests -= 1

    def finish(self) -> None:
        """End in order: the client is closed, which ends every thread's wait."""
        if not self.dead:
            self.spawn(self._close, "close")

    def _close(self) -> None:
        self.closing = True
        if self.client is not None:
            self.call("close", self.client.close)

    def begins(self, request: Any, service: str) -> int:
        """Note that a handler begins; the library must not take a violation for its error."""
        try:
            return super().begins(request, service)
        except Violation as violation:
            self.world.fail(self.name, violation)
            raise

    def unfinished(self) -> str:
        """Say in words what has not ended after the end."""
        threads = () if self.dead else self.loop.alive
        return next((f"{self.name}: thread {thread.name}" for thread in threads), "")

    # --- what its roles stand on -----------------------------------------------------------------

    def pause(self) -> None:  # type: ignore[override]
        """Let time pass."""
        sleep(self.draw_us(self.pace_us // 2, self.pace_us) / 1_000_000)

    def call(  # type: ignore[override]
        self,
        what: str,
        work: Callable[[], Any],
        act: Act | None = None,
        *,
        lawful: tuple[type[MalamuteError], ...] = (),
        codes: tuple[str, ...] = (),
        impatient: bool = False,
    ) -> Told:
        """Make a call of the library, open until it has returned; see Process.call().

        impatient: the call may be interrupted.
        """
        number = self.opens(what)
        me = self.loop.current
        assert me is not None
        if impatient and self.rng.random() < 0.1:

            def interrupt() -> None:
                if number in self.calls:
                    self.loop.interrupt(me)

            self.after(self.draw_us(10, 60_000), interrupt)
        try:
            return Told(work())
        except KeyboardInterrupt:
            return Told(error=Timeout("the caller was interrupted"))
        except MalamuteError as error:
            return self.failed(what, act, error, lawful, codes)
        finally:
            me.interrupted = False
            self.calls.pop(number, None)

    def confirmed(  # type: ignore[override]
        self, what: str, act: Act, work: Callable[[], Any], stream: str, level: str
    ) -> Told:
        """Do a call that a confirm ends, and judge that."""
        losses = self.world.losses
        told = self.call(what, work, act, impatient=True)
        self.told(act, told, stream, losses, level)
        return told

    def step(self, fill: Callable[[Any, Act], None]) -> Told:  # type: ignore[override]
        """Make one atomic step; fill puts its parts into the step and the act."""
        level = self.level()
        act = self.act(level=level, atomic=True)
        losses = self.world.losses

        def work() -> Any:
            with self.client.atomic(confirm=level) as step:
                fill(step, act)
                self.more(step, act)
            return step.confirmation

        told = self.call("a step", work, act, impatient=True)
        if told.value is not None:
            self.model.caller_confirmed(
                act, "", -1, LEVELS[level], sure=losses == self.world.losses
            )
        return told

    def collect(self) -> None:
        """Have objects dropped unclosed collected: now, or when no object refers to them any more.

        The client's own thread refers to its last result until its next turn.
        """
        gc.collect()
        for delay_us in (1_000_000, 5_000_000, 12_000_000):
            self.after(delay_us, _collect)

    def together(self, works: list[Callable[[], Any]]) -> None:
        """Do several things at once, a thread each."""
        threads = [self.spawn(work, "one of several") for work in works]
        for thread in threads:
            thread.join()


def _collect() -> None:
    gc.collect()


# --- who sends -------------------------------------------------------------------------------


def sends(p: ThreadedProcess) -> None:
    """Send mail, one by one, several at once, in bulk, in steps."""
    rng, client = p.rng, p.client
    while p.goes_on():
        p.pause()
        box, level, draw = rng.choice(p.world.boxes), p.level(), rng.random()
        if draw < 0.4:
            act = p.act(level=level)
            body = p.record(act, "send", box)
            p.confirmed("send", act, partial(client.send, box, body, confirm=level), "", level)
        elif draw < 0.6:
            pairs = []
            for _ in range(3):
                act = p.act(level=level)
                body = p.record(act, "send", box)
                taken = p.call(
                    "send_nowait", partial(client.send_nowait, box, body, confirm=level), act,
                    codes=("window",),
                )  # fmt: skip
                if taken.value is not None:
                    pairs.append((act, taken.value))
            for act, pending in pairs:
                p.confirmed("result", act, partial(pending.result, None), "", level)
        elif draw < 0.75:
            act = p.act(level=level)
            bodies = [p.record(act, "send", box) for _ in range(rng.choice((2, 6)))]
            losses = p.world.losses
            told = p.call("send_many", partial(client.send_many, box, bodies, confirm=level), act)
            if told.value:
                p.told(act, Told(told.value[0]), "", losses, level)
        else:
            p.step(partial(sends_in_step, p, box))
        if rng.random() < 0.1:
            p.call("flush", client.flush)


def publishes(p: ThreadedProcess) -> None:
    """Publish records, of every level."""
    rng, client = p.rng, p.client
    while p.goes_on():
        p.pause()
        stream, level = rng.choice(p.world.inputs), p.level()
        for _ in range(rng.choice((1, 1, 5))):
            act = p.act(level=level)
            body = p.record(act, "publish", stream)
            if rng.random() < 0.2:
                with contextlib.suppress(BrokerRefused):  # The window is full.
                    client.publish_nowait(stream, body, confirm=level)
            else:
                work = partial(client.publish, stream, body, confirm=level)
                p.confirmed("publish", act, work, stream, level)


# --- who asks --------------------------------------------------------------------------------


def requests(p: ThreadedProcess) -> None:
    """Send requests to services, several at once, with times and without."""
    while p.goes_on():
        p.pause()
        count = p.rng.choice((1, 1, 3))
        if count == 1:
            _request(p)
        else:
            p.together([partial(_request, p)] * count)


def _request(p: ThreadedProcess) -> None:
    rng, client = p.rng, p.client
    service = rng.choice(p.world.services)
    act = p.act()
    mood = bytes([rng.choice((0, 0, 0, 0, 0, FAILS, GIVES_BACK))])
    body = p.record(act, "request", service, mood)
    serial = serial_of(body)
    draw = rng.random()
    bound, lawful = p.bound()
    if draw < 0.75:
        confirm = rng.choice(("none", "none", "stored", "synced"))
        if confirm == "stored" and not p.does("requests are confirmed as stored"):
            confirm = "none"
        work = partial(client.request, service, body, confirm=confirm, **bound)
        told = p.call(f"request of record {serial}", work, act, lawful=lawful, impatient=True)
        judge(p, serial, told)
    elif draw < 0.85:

        def several() -> list[Any]:
            with contextlib.closing(client.requests(service, body, **bound)) as replies:
                return list(replies)

        told = p.call("requests", several, act, lawful=lawful, impatient=True)
        for reply in told.value or ():
            judge(p, serial, Told(reply))
        judge(p, serial, Told(error=told.error))
    else:
        level, key = p.level(), rng.randbytes(6)
        if p.identity:
            submit = partial(client.submit, service, body, key=key, confirm=level)
            p.confirmed("submit", act, submit, "", level)
            if rng.random() < 0.3:
                p.pause()
                # The service may have gone with the request, in a power loss.
                p.call("cancel", partial(client.cancel, service, key), codes=("unknown_service",))


# --- who reads mail --------------------------------------------------------------------------


def reads(box: str | None) -> Callable[[ThreadedProcess], None]:
    """Read a mailbox; None: the process's own."""

    def role(p: ThreadedProcess) -> None:
        place = box if box is not None else p.holder
        while not p.closing:
            try:
                closed = _read(p, box, place)
            except MalamuteError as error:
                reckoned(p, "an inbox", error)
                closed = False
            if not closed:
                p.collect()
            p.pause()

    return role


def _read(p: ThreadedProcess, box: str | None, place: str) -> bool:
    """Read some of a mailbox; returns whether the inbox was closed: else it is to be collected."""
    rng = p.rng
    ack = rng.choice(("next", "manual"))
    left = rng.choice((2, 10, 1_000))
    closes: bool = rng.random() < 0.8
    inbox = p.client.inbox(box, ack=ack, credit_records=rng.choice((1, 3, 8192)))
    with inbox if closes else contextlib.nullcontext():
        while left > 0:
            patience_ms = rng.choice((None, None, 50))
            try:
                if rng.random() < 0.2:
                    batch = inbox.next_batch(patience_ms)
                    mails = [] if batch is None else list(batch)
                else:
                    mail = inbox.next(patience_ms)
                    mails = [] if mail is None else [mail]
            except Timeout:
                continue
            if not mails:
                break
            for mail in mails:
                shown(p, place, mail)
            if rng.random() < 0.3:
                p.pause()
            if ack == "manual":
                for mail in mails:
                    _settle_mail(p, place, mail)
            left -= len(mails)
    return closes


def _settle_mail(p: ThreadedProcess, place: str, mail: Any) -> None:
    draw = p.rng.random()
    if draw < 0.5:
        p.call("mail.ack", mail.ack)
    elif draw < 0.65:
        p.call("mail.nack", partial(mail.nack, p.rng.choice((0, 20))))
    else:

        def fill(step: Any, act: Act) -> None:
            step.ack(mail)
            if mail.number < MEMORY_NUMBERS:
                act.wishes.append(Wish("ack", place, (), (mail.number,)))

        told = p.step(fill)
        if told.error is not None and told.code != "not_held":
            # The step did not happen, and the message is the program's again.
            p.call("mail.nack", mail.nack)


# --- who works -------------------------------------------------------------------------------


def _handled(p: ThreadedProcess, request: Any, service: str) -> bytes | None:
    """Do a handler's work; returns the reply, or None when it has finished the request."""
    p.at_work[request.number] = None
    try:
        return _handle(p, request, service)
    finally:
        p.at_work.pop(request.number, None)


def _handle(p: ThreadedProcess, request: Any, service: str) -> bytes | None:
    rng = p.rng
    serial = p.begins(request, service)
    mood = bytes(request.body)[8]
    if rng.random() < 0.7:
        p.pause()
    if mood == FAILS:
        p.model.history.failing.add(serial)
        raise Deliberate("as it was asked for")
    if mood == GIVES_BACK and request.attempts == 1:
        p.call("nack", partial(request.nack, 5, wait=rng.random() < 0.5), lawful=LATE)
        return None
    if rng.random() < 0.2 and p.does("handlers renew leases"):
        p.call("renew", request.renew, lawful=(ConnectionLost,))
    draw = rng.random()
    if draw < 0.15:
        _, body = p.answer(request)
        first = partial(request.reply, body, last=False, wait=rng.random() < 0.5)
        p.call("a first reply", first, lawful=LATE)
    elif draw < 0.2:
        return None
    if rng.random() < 0.5 and p.does("handlers answer in steps"):
        told = p.step(lambda step, act: p.reply_part(step, act, request, service))
        if told.error is not None:
            if told.code != "not_held" and not request.finished:
                p.call("nack", partial(request.nack, 1), lawful=LATE)
            raise told.error
        return None
    return p.answer(request)[1]


def serves(service: str) -> Callable[[ThreadedProcess], None]:
    """Run handlers through the library."""

    def role(p: ThreadedProcess) -> None:
        rng = p.rng

        def handler(request: Any) -> Any:
            body = _handled(p, request, service)
            if body is not None and rng.random() < 0.1:
                return iter_of(body)
            return body

        def iter_of(body: bytes) -> Any:
            yield body

        while not p.closing:
            try:
                with p.client.worker(
                    service, concurrency=rng.choice((1, 2, 4)),
                    lease_ms=rng.choice((None, 100, 300)),
                    confirm=rng.choice(("stored", "synced")),
                ) as worker:  # fmt: skip
                    if rng.random() < 0.3:
                        p.spawn(_closes, "closer", p, worker)
                    worker.run(handler)
            except MalamuteError as error:
                reckoned(p, "a worker", error)
            p.pause()

    return role


def _closes(p: ThreadedProcess, worker: Any) -> None:
    """Close a worker under its handlers, after a while."""
    for _ in range(p.rng.choice((1, 5, 20))):
        p.pause()
    p.call("worker.close", partial(worker.close, drain=p.rng.random() < 0.5, drain_ms=1_000))


def works(service: str) -> Callable[[ThreadedProcess], None]:
    """Run a loop of its own over the requests."""

    def role(p: ThreadedProcess) -> None:
        while not p.closing:
            try:
                closed = _work_some(p, service)
            except MalamuteError as error:
                reckoned(p, "a worker", error)
                closed = False
            if not closed:
                p.collect()
            p.pause()

    return role


def _work_some(p: ThreadedProcess, service: str) -> bool:
    """Work for a service; returns whether the worker was closed: else it is to be collected."""
    rng = p.rng
    left = rng.choice((2, 10, 1_000))
    closes: bool = rng.random() < 0.8
    worker = p.client.worker(
        service, concurrency=rng.choice((1, 3)), lease_ms=rng.choice((None, 100, 300))
    )
    with worker if closes else contextlib.nullcontext():
        while left:
            try:
                request = worker.next(rng.choice((None, 50)))
            except Timeout:
                continue
            if request is None:
                break
            left -= 1
            _work(p, request, service)
    return closes


def _work(p: ThreadedProcess, request: Any, service: str) -> None:
    rng = p.rng
    try:
        body = _handled(p, request, service)
    except Deliberate as error:
        fail = partial(request.fail, str(error), wait=rng.random() < 0.5)
        p.call("fail", fail, lawful=LATE)
        return
    except BrokerRefused:
        return
    except MalamuteError:
        # The caller of the step was interrupted, and does not know whether the step was taken.
        return
    wait = rng.random() < 0.5
    if body is not None:
        p.call("reply", partial(request.reply, body, wait=wait), lawful=LATE)
    elif not request.finished:
        p.call("complete", partial(request.complete, wait=wait), lawful=LATE)


# --- who shares a stream ---------------------------------------------------------------------


def joins(stream: str, group: str, kind: str) -> Callable[[ThreadedProcess], None]:
    """Be a member of a group."""

    def role(p: ThreadedProcess) -> None:
        rng = p.rng
        place = f"{stream}/{group}"
        visibility = "durable" if is_durable(place) else "live"
        bounds = p.world.group_bounds
        while not p.closing:
            ack = rng.choice(("next", "manual"))
            left = rng.choice((2, 10, 1_000))
            try:
                with p.client.group(
                    stream, group, kind=kind, start="earliest", ack=ack,
                    credit_records=rng.choice((1, 4, 8192)), visibility=visibility, create=True,
                    settings=bounds,
                ) as member:  # fmt: skip
                    if bounds is not None and ack == "manual":
                        _share(p, place, member, left)
                        continue
                    for record in member:
                        serial = serial_of(record.body)
                        p.world.note("record shown", p.name, place, record.offset, serial)
                        p.model.show(place, serial)
                        if rng.random() < 0.3:
                            p.pause()
                        if ack == "manual":
                            _settle_record(p, place, member, record)
                        left -= 1
                        if not left:
                            break
            except MalamuteError as error:
                reckoned(p, "a group", error)
            p.pause()

    return role


def _share(p: ThreadedProcess, place: str, member: Any, left: int) -> None:
    """Take batches, and settle their records in any order, some of them late."""
    rng = p.rng
    leases = "lease_ms" in p.world.group_bounds
    held: dict[int, Any] = {}
    while (left > 0 or held) and not p.closing:
        batch = None
        if left > 0:
            with contextlib.suppress(Timeout):
                batch = member.next_batch(rng.choice((0, 5, 50)) if held else None)
            if batch is None and not held:
                return
        for record in batch.records() if batch is not None else ():
            serial = serial_of(record.body)
            p.world.note("record shown", p.name, place, record.offset, serial)
            p.model.show(place, serial)
            known = held.get(record.offset)
            # After a power loss the offset is another record's.
            if known is not None and known.epoch == record.epoch and not leases:
                raise Violation("two_hands", f"{place}: {record.offset} came to {p.name} again")
            held[record.offset] = record
            left -= 1
        if held and (rng.random() < 0.6 or batch is None):
            if rng.random() < 0.3:
                p.pause()
            record = held.pop(rng.choice(sorted(held)))
            if rng.random() < 0.2:
                p.call("member.renew", partial(member.renew, record))
            draw = rng.random()
            if draw < 0.1:
                p.call("member.fail", partial(member.fail, record, "so"))
            elif draw < 0.15:
                p.call("member.release", partial(member.release, record))
            else:
                _settle_record(p, place, member, record)


def _settle_record(p: ThreadedProcess, place: str, member: Any, record: Any) -> None:
    draw = p.rng.random()
    if draw < 0.5:
        p.call("member.ack", partial(member.ack, record))
    elif draw < 0.65 or not p.does("members acknowledge in steps"):
        p.call("member.nack", partial(member.nack, record, p.rng.choice((0, 20))))
    else:

        def fill(step: Any, act: Act) -> None:
            step.ack(record)
            act.wishes.append(Wish("records", place, (), (record.offset,)))

        told = p.step(fill)
        if told.error is not None and told.code != "not_held":
            p.call("member.nack", partial(member.nack, record))


ROLES: dict[str, Callable[..., Callable[[ThreadedProcess], None]]] = {
    "sends": lambda: sends,
    "publishes": lambda: publishes,
    "requests": lambda: requests,
    "reads": reads,
    "serves": serves,
    "works": works,
    "joins": joins,
}
"""Name -> function that makes the role."""
