"""Imports point one way (CONTRIBUTING.md): a module imports only from its own layer and those below."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [  # from the bottom; longest matching name counts
    {"rla_lightning", "rla_lightning.types"},
    {"rla_lightning.sandbox"},
    {"rla_lightning.algorithm", "rla_lightning.environments"},
    {"rla_lightning.distributed", "rla_lightning.settings", "rla_lightning.metrics", "rla_lightning.checkpoints"},
    {"rla_lightning.models", "rla_lightning.rollout", "rla_lightning.curriculum"},
    {
        *("rla_lightning.measure", "rla_lightning.updates", "rla_lightning.optimization"),
        *("rla_lightning.evaluation", "rla_lightning.feedback", "rla_lightning.metrics_code"),
        "rla_lightning.compatibility",
    },
    {"rla_lightning.module", "rla_lightning.datamodule"},
    {"rla_lightning.runs"},
    {"rla_lightning.cli"},
    {"callbacks"},
]
APART = {  # of one layer, but they must not know each other
    "rla_lightning.module": {"rla_lightning.datamodule"},
    "rla_lightning.datamodule": {"rla_lightning.module"},
    "rla_lightning.algorithm": {"rla_lightning.environments"},
    "rla_lightning.environments": {"rla_lightning.algorithm"},
    "rla_lightning.models": {"rla_lightning.rollout", "rla_lightning.curriculum"},
    "rla_lightning.rollout": {"rla_lightning.curriculum"},
}
FILES = sorted([*(ROOT / "rla_lightning").rglob("*.py"), *(ROOT / "callbacks").rglob("*.py")])


def name_of(file: Path) -> str:
    return ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def part_of(module: str) -> str:
    """The entry of LAYERS that a module belongs to."""
    names = [name for layer in LAYERS for name in layer if module == name or module.startswith(f"{name}.")]
    part = max(names, key=len)
    assert part != "rla_lightning" or module == part, f"say in LAYERS where {module} belongs"
    return part


def layer_of(module: str) -> int:
    return next(index for index, layer in enumerate(LAYERS) if part_of(module) in layer)


def imported(source: str) -> set[str]:
    """Our modules that a source file imports, at any place in it."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            names |= {node.module or ""}
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in names if name.split(".")[0] in ("rla_lightning", "callbacks")}
    return {name for name in ours if (path := ROOT.joinpath(*name.split("."))).is_dir() or path.with_suffix(".py").is_file()}


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_point_down(file: Path) -> None:
    module = name_of(file)
    for other in imported(file.read_text()) - {"rla_lightning", "callbacks"}:
        assert layer_of(other) <= layer_of(module), f"{module} imports {other} of a layer above"
        assert part_of(other) not in APART.get(part_of(module), set()), f"{module} imports {other}, which it must not know"


def test_the_package_knows_no_callbacks() -> None:
    package = [file for file in FILES if file.is_relative_to(ROOT / "rla_lightning")]
    assert len(package) > 30
    assert not [name_of(file) for file in package if any(name.startswith("callbacks") for name in imported(file.read_text()))]


def test_this_test_sees_imports() -> None:
    source = "import rla_lightning.cli\ndef f():\n    from rla_lightning import module\n    from callbacks import WarmStart"
    assert imported(source) == {"rla_lightning", "rla_lightning.cli", "rla_lightning.module", "callbacks"}
    assert layer_of("rla_lightning.rollout.collect") < layer_of("rla_lightning.module") < layer_of("callbacks.summary")
