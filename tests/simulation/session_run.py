"""Scenario `session`: the real client library against the real core and rings.

Owns one seed of it: sessions beside scripted clients, under the faults of the scenario
`broker`, and consumers whose process dies and goes on at the position it had saved.
"""

from __future__ import annotations

from tests.simulation.broker_run import PATTERNS, BrokerRun
from tests.simulation.clients import LEVEL_NONE, LEVEL_STORED, LEVEL_SYNCED
from tests.simulation.sessions import SessionConsumer, SessionProducer


class SessionRun(BrokerRun):
    """One seed of the scenario."""

    def _begin(self) -> None:
        rng = self.rng
        names = list(self.streams)
        for number in range(10, 10 + rng.randint(1, 3)):
            self.producers.append(
                SessionProducer(
                    self,
                    f"sp{number}",
                    number,
                    rng.sample(names, rng.randint(1, len(names))),
                    level=rng.choice((LEVEL_SYNCED, LEVEL_SYNCED, LEVEL_STORED, LEVEL_NONE)),
                    batches=rng.choice((10, 30, 60)),
                    serials=self._next_serial,
                    make=self._make,
                    idempotent=rng.random() < 0.8,
                    window_bytes=rng.choice((1_000, 20_000, 8 << 20)),
                    batch_bytes=rng.choice((100, 2_000, 30_000)),
                    linger_ms=rng.choice((0, 0, 5)),
                )
            )
        for number in range(rng.randint(1, 3)):
            self._add_consumer(f"sc{number}")
        if rng.random() < 0.3:
            super()._begin()
            return
        for client in [*self.producers, *self.consumers]:
            client.start()

    def _add_consumer(self, name: str) -> None:
        rng = self.rng
        if not name.startswith("sc") and rng.random() < 0.5:
            super()._add_consumer(name)
            return
        self.consumers.append(
            SessionConsumer(
                self,
                name,
                rng.choice([stream for stream in self.streams if stream != "mem"]),
                rng.choice(PATTERNS),
                durable=rng.random() < 0.3,
                start=self._start_point(),
                window=(rng.choice((1, 5, 1000)), rng.choice((300, 10_000, 1 << 20))),
                pace_us=rng.choice((50, 2_000, 40_000)),
                until="tail" if rng.random() < 0.15 else "",
                whole=rng.random() < 0.3,
            )
        )

    def _fault(self) -> None:
        sessions = [client for client in self.consumers if isinstance(client, SessionConsumer)]
        if sessions and self.rng.random() < 0.15:
            self.rng.choice(sessions).reborn()
        super()._fault()
