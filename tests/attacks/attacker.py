"""`python -m tests.attacks.attacker NAME ENDPOINT ROUNDS SECONDS SEED BROKER`: one attack.

Owns the attacker's process. It yields the processor to the broker and the canary (nice 10), since
in an operator's network they would be on other machines. Prints one line of JSON when it is done.
"""

from __future__ import annotations

import json
import os
import sys
import time

from tests.attacks.aim import Aim
from tests.attacks.attacks import ATTACKS

NICE = 10


def main(name: str, endpoint: str, rounds: str, seconds: str, seed: str, broker: str) -> None:
    """Attack."""
    os.nice(NICE)
    began = time.monotonic()
    aim = Aim(
        endpoint, rounds=int(rounds), seconds=float(seconds), seed=int(seed), broker=int(broker)
    )
    ended = ""
    try:
        ATTACKS[name].do(aim)
    except OSError as error:
        # A broker that has ended takes no connections; the parent process sees whether it has.
        ended = f"the attacker could not go on: {error!r}"
    told = {
        "sent": aim.sent, "lost": aim.lost, "rounds": aim.round, "ended": ended,
        "seconds": round(time.monotonic() - began, 1), "cpu_s": round(time.process_time(), 1),
    }  # fmt: skip
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
