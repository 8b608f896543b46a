"""The link to the broker, kept for as long as the process runs.

Owns the client. The rule: whatever ends a session, be it a refused credential or an operator,
another one is tried after a pause: what is wrong may be mended without a restart here, and until
then the pages say what it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final

from malamute_protocol.errors import MalamuteError
from malamute_py.client.aio.client import connect
from malamute_py.client.session.events import Closed, LinkEvent, Unlinked
from malamute_py.client.settings import Credential
from malamute_py.http.source import Source

_RETRY_MAX_MS: Final = 1_000
_PAUSE_S: Final = 5.0


async def keep_linked(source: Source, endpoints: Sequence[str], credential: Credential) -> None:
    """Link to the broker, give the source the client, and link anew when the session is over.

    Runs as a task of the HTTP side until it is cancelled.
    """
    while True:
        over = asyncio.Event()

        def on_link(event: LinkEvent, over: asyncio.Event = over) -> None:
            """Let the source tell why there is no link; set `over` when the session has ended.

            over: bound here, so that a late event of this session does not end the next one.
            """
            if isinstance(event, Unlinked):
                source.unlinked = f"no link to the broker: {event.reason}"
            elif isinstance(event, Closed):
                source.unlinked = f"the session is over: {event.error}"
                over.set()

        try:
            async with connect(
                # timeout_ms: for as long as it takes; meanwhile the pages say why.
                tuple(endpoints), timeout_ms=None, credential=credential, on_link=on_link,
                software="malamute http", retry_max_ms=_RETRY_MAX_MS,
            ) as client:  # fmt: skip
                source.client = client
                await over.wait()
        except MalamuteError as error:
            source.unlinked = f"no link to the broker: {error}"
        finally:
            source.client = None
        await asyncio.sleep(_PAUSE_S)
