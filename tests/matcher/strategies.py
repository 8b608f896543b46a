"""Small worlds of patterns and headers, in which things match often enough to be compared."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from malamute_protocol.pattern import DEPTH_MAX

PARTS = ("a", "b", "c", "")
subjects = st.lists(st.sampled_from(PARTS), min_size=1, max_size=4).map(".".join)
keys = st.lists(subjects, min_size=1, max_size=3).map(tuple)
names = st.sampled_from(("f", "g", "h", "topic"))
values = st.sampled_from(("", "1", "2"))
fields = st.dictionaries(names, values, max_size=4).map(lambda d: tuple(sorted(d.items())))
headers = st.tuples(keys, fields)

topics = (
    st.lists(st.sampled_from(("a", "b", "c", "*", "#")), min_size=1, max_size=4)
    .map(".".join)
    .map(lambda text: ["topic", text])
)
prefixes = subjects.map(lambda text: ["prefix", text])
regexes = st.sampled_from(
    ("^a", "b$", "a.*c", "", "[ab]\\.[^.]*$", "^(a|b)+$", "c{1,2}", "\\.")
).map(lambda text: ["regex", text])
criteria = st.one_of(st.tuples(names).map(list), st.tuples(names, values).map(list))
field_patterns = st.tuples(
    st.sampled_from(("all", "any")), st.lists(criteria, min_size=1, max_size=4)
).map(lambda t: ["fields", t[0], t[1]])
by_subject = st.one_of(topics, prefixes, regexes)
leaves = st.one_of(by_subject, topics, field_patterns, field_patterns, st.just(["all"]))


def _combined(inner: st.SearchStrategy[list[Any]]) -> st.SearchStrategy[list[Any]]:
    several = st.lists(inner, min_size=1, max_size=4)
    return st.one_of(
        several.map(lambda each: ["and", *each]),
        several.map(lambda each: ["or", *each]),
        inner.map(lambda each: ["not", each]),
    )


def _depth(wire: list[Any]) -> int:
    if wire[0] not in ("and", "or", "not"):
        return 1
    return 1 + max(_depth(child) for child in wire[1:])


patterns = st.recursive(leaves, _combined, max_leaves=8).filter(
    lambda wire: _depth(wire) <= DEPTH_MAX
)
