"""Field patterns: presence or value of a record's fields, all of them or any.

Field patterns have no table: each asks for facts, and the index's conjunctions find it by its
rarest fact. For each new pattern canonical() brings it to one form, filing() says under which facts
the index files it, and predicate() makes its test of one header. Source: appendix A of the Malamute
whitepaper, field matching (docs/design.md, References).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from malamute_protocol.pattern import check_fields
from malamute_py.matcher.kinds import Canonical, Fact, Fields, Filing, Keys, PatternKind, Predicate


class FieldsKind(PatternKind):
    """["fields", "all" | "any", [[name] | [name, value], ...]]"""

    name = "fields"

    def check(self, wire: Sequence[Any]) -> Sequence[Any]:
        """Check the wire form as validate() of the protocol does for this kind."""
        return check_fields(wire)

    def canonical(self, wire: list[Any]) -> Canonical:
        """Sort the criteria, keep each once, and drop those that another one implies."""
        criteria = {tuple(criterion) for criterion in wire[2]}
        mode = wire[1]
        # (name,) asks for presence, (name, value) for the value; [:1] is the presence of either.
        present = {criterion for criterion in criteria if len(criterion) == 1}
        if mode == "all":
            # A value implies presence.
            criteria -= {criterion[:1] for criterion in criteria if len(criterion) == 2}
        else:
            # Presence is enough, whatever the value.
            criteria = present | {c for c in criteria if c[:1] not in present}
        # With one criterion both modes mean the same.
        return ("fields", "all" if len(criteria) == 1 else mode, tuple(sorted(criteria)))

    def predicate(self, canonical: Canonical) -> Predicate:
        """Return a predicate that looks the names up."""
        _, mode, criteria = canonical
        # A criterion is (name,) or (name, value); None stands for any value.
        wanted = tuple((name, value[0] if value else None) for name, *value in criteria)
        if mode == "all":

            def holds_all(keys: Keys, fields: Fields) -> bool:
                """Whether a record has all of the wanted fields, with the wanted values."""
                held = dict(fields)
                for name, value in wanted:
                    got = held.get(name)
                    if got is None or (value is not None and got != value):
                        return False
                return True

            return holds_all

        def holds_any(keys: Keys, fields: Fields) -> bool:
            """Whether a record has any of the wanted fields, with its value where one is wanted."""
            held = dict(fields)
            for name, value in wanted:
                got = held.get(name)
                if got is not None and (value is None or got == value):
                    return True
            return False

        return holds_any

    def filing(self, canonical: Canonical) -> Filing:
        """File `all` under one conjunction of all criteria, and `any` under one for each."""
        _, mode, criteria = canonical
        # The fact of (name,) is the name: the field is there; that of (name, value) is the pair.
        facts: list[Fact] = [(name, *value) if value else name for name, *value in criteria]
        if mode == "all":
            return Filing((frozenset(facts),), exact=True)
        return Filing(tuple(frozenset((fact,)) for fact in facts), exact=True)
