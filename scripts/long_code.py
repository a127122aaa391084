"""List files over 400 lines and functions over 60: a longer one needs a reason a reader would accept."""

import ast
from pathlib import Path

MOST_LINES = {"file": 400, "function": 60, "training_step": 30}


def main() -> None:
    for folder in ("rla_lightning", "callbacks", "scripts"):
        for path in sorted(Path(folder).rglob("*.py")):
            source = path.read_text()
            lines = source.count("\n")
            if lines > MOST_LINES["file"]:
                print(f"long file: {path} has {lines} lines")
            for node in ast.walk(ast.parse(source)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or node.lineno) - node.lineno + 1
                    if length > MOST_LINES.get(node.name, MOST_LINES["function"]):
                        print(f"long function: {path}:{node.lineno} {node.name} has {length} lines")


if __name__ == "__main__":
    main()
