"""What is wrong with the tables of a TOML file, as a sentence with the value and the way out."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
from msgspec import Struct


@dataclass(frozen=True)
class Shape:
    """What the tables must be: a struct, what its lists of tables hold, and whether --set can change a key."""

    kind: type[Struct]
    item: type[Struct]
    settable: bool


def explain(message: str, tree: Mapping[str, Any], source: str, shape: Shape) -> str:
    """msgspec's message as a sentence with the value and the way out."""
    rule, _, where = message.partition(" - at `$")
    path = [part for part in re.split(r"[.\[\]`]+", where) if part]
    if unknown := re.search(r"unknown field `(.*)`", rule):
        return _explain_unknown(unknown[1], path, source, shape)
    value: Any = tree
    for part in path:
        value = value.get(part) if isinstance(value, Mapping) else _item(value, part)
    name = ".".join(path) or "it"
    if missing := re.search(r"missing required field `(.*)`", rule):
        return f"{source}: {name} has no `{missing[1]}`, which it needs; add it"
    rule = re.sub(r"`", "", rule.replace("Expected `", "expected `")).replace("Invalid enum value", "invalid value")
    settable = shape.settable and not any(part.isdigit() for part in path)
    way_out = "change it there" + (f" or with --set {name}=..." if settable else "")
    if choices := _choices(path, shape.kind):
        rule += f" (known: {', '.join(choices)})"
    return f"{source}: {name} = {value!r} cannot be used: {rule}; {way_out}"


def _item(value: Any, part: str) -> Any:
    return value[int(part)] if isinstance(value, (list, tuple)) and part.isdigit() else value


def _explain_unknown(key: str, path: list[str], source: str, shape: Shape) -> str:
    section: Any = shape.kind
    for part in path:
        found = {f.name: f.type for f in msgspec.structs.fields(section)}.get(part, shape.item)
        kinds = (found, *get_args(found))
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Struct)), shape.item)
    known = list(section.__struct_fields__)
    close = difflib.get_close_matches(key, known, 1)
    hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(known)}"
    return f"{source}: {'.'.join([*path, key])} is not a known key; {hint}"


def _choices(path: list[str], kind: type[Struct]) -> list[str]:
    """The allowed words of a Literal field."""
    section: Any = kind
    for part in path:
        if not (isinstance(section, type) and issubclass(section, Struct)):
            return []
        section = {f.name: f.type for f in msgspec.structs.fields(section)}.get(part)
    return [word for kind in (section, *get_args(section)) for word in get_args(kind) if isinstance(word, str)]
