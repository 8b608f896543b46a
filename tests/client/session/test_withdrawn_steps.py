"""Steps in the session whose callers have gone: what they took from readers goes back."""

from __future__ import annotations

import pytest

from tests.client.session.test_steps import Bag, Item, Stepping, published


@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("code", ["conflict", "not_held", "wait"])
def test_what_a_withdrawn_step_took_from_a_reader_goes_back_when_it_is_refused(
    merged: bool, code: str
) -> None:
    """No program knew that its reader held it again, which kept it from all others for ever."""
    script = Stepping()
    inbox = Bag(7, {1})
    step = published(b"gone")
    step.ack(Item(inbox, 1))
    script.add(step, "1")
    if merged:
        script.add(published(b"kept"), "2")
    script.step()
    script.session.steps.withdraw(step)
    script.refuse(script.sent()[0][0][0], code)
    assert (inbox.held, inbox.gone, inbox.back) == (set(), set(), [1])


@pytest.mark.parametrize("merged", [False, True])
def test_what_a_step_took_from_a_reader_goes_back_when_it_is_withdrawn_after_a_refusal(
    merged: bool,
) -> None:
    """It waits to leave again, and its caller cannot know that it is not under way."""
    script = Stepping()
    inbox = Bag(7, {1})
    step = published(b"gone")
    step.ack(Item(inbox, 1))
    script.add(step, "1")
    if merged:
        script.add(published(b"kept"), "2")
    script.step()
    script.refuse(script.sent()[0][0][0], "wait", 500)
    script.session.steps.withdraw(step)
    assert (inbox.held, inbox.gone, inbox.back) == (set(), set(), [1])


def test_what_a_step_took_goes_back_when_its_caller_is_cancelled_as_the_refusal_comes() -> None:
    """Its caller was to be told of the refusal, and hears of the cancellation alone."""
    script = Stepping()
    inbox = Bag(7, {1})
    step = published(b"gone")
    step.ack(Item(inbox, 1))
    script.add(step, "1")
    script.step()
    script.refuse(script.sent()[0][0][0], "conflict")
    assert (inbox.held, inbox.back) == ({1}, [])
    script.session.steps.withdraw(step)
    script.session.steps.withdraw(step)
    assert (inbox.held, inbox.back) == (set(), [1])
