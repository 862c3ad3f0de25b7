"""docs/config.md names every key of the config with its default and the words of its docstring."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import msgspec
import tomli_w

from shoal import config
from shoal.jobs import machine

ROOT = Path(__file__).resolve().parents[2]


def sections() -> dict[str, type]:
    """The sections of a config by name; "" holds what stands above all sections."""
    fields = {f.name: type(f.default) for f in msgspec.structs.fields(config.Config)}
    return {"": config.Config} | {name: kind for name, kind in fields.items() if issubclass(kind, msgspec.Struct)}


def docstrings(section: type) -> dict[str, str]:
    """The string that follows each field in the source."""
    tree = ast.parse(Path(config.__file__).read_text(encoding="utf-8"))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == section.__name__).body
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            found[field.target.id] = text.value.value.strip()
    return found


def table() -> str:
    """The reference as Markdown."""
    parts = []
    for name, section in sections().items():
        parts.append(f"## [{name}]\n" if name else "## top level\n")
        parts.append("| key | default | meaning |\n| --- | --- | --- |")
        words = docstrings(section)
        for field in msgspec.structs.fields(section):
            if isinstance(field.default, msgspec.Struct):
                continue
            default = "" if field.default is None else tomli_w.dumps({"k": field.default})[4:].strip()
            default = " ".join(default.split()).replace("[ ", "[").replace(", ]", "]")
            parts.append(f"| `{field.name}` | {f'`{default}`' if default else ''} | {words.get(field.name, '')} |")
        parts.append("")
    return "\n".join(parts)


def test_config_reference_is_up_to_date() -> None:
    text = (ROOT / "docs" / "config.md").read_text(encoding="utf-8")
    assert table().strip() in text, "docs/config.md is behind; python tests/unit/test_docs.py prints the new tables"


def test_every_key_of_a_machine_file_is_explained() -> None:
    text = (ROOT / "docs" / "batch.md").read_text(encoding="utf-8")
    for field in msgspec.structs.fields(machine.Machine):
        table = field.type if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct) else None
        for name in [f"{field.name}.{key}" for key in table.__struct_fields__] if table else [field.name]:
            assert f"`{name}`" in text, f"docs/batch.md does not name {name}"


if __name__ == "__main__":
    print(table())
