"""Fails if a module of the package has more than 400 lines, or a function of it more than 40 of code."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MODULE_LINES, FUNCTION_LINES = 400, 40


def too_long() -> list[str]:
    """One line a fault."""
    faults = []
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]):
        text = path.read_text(encoding="utf-8")
        name = path.relative_to(ROOT)
        if (lines := len(text.splitlines())) > MODULE_LINES:
            faults.append(f"{name} has {lines} lines, and may have {MODULE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                first = node.body[1] if ast.get_docstring(node) and len(node.body) > 1 else node.body[0]
                length = (node.end_lineno or 0) - first.lineno + 1
                if length > FUNCTION_LINES:
                    faults.append(f"{name}:{node.lineno} {node.name} has {length} lines, and may have {FUNCTION_LINES}")
    return faults


if __name__ == "__main__":
    sys.exit("\n".join(too_long()) or 0)
