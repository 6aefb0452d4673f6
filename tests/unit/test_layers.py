import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

TORCH_FREE = ["trainer", "trainer.config", "trainer.errors", "trainer.seat", "trainer.cli.main"]


def test_imports_point_down_only():
    """The contract of pyproject.toml, checked by import-linter itself."""
    code = "from importlinter.cli import lint_imports_command as run; run()"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_package_and_module_is_in_the_contract_and_the_readme():
    settings = tomllib.loads(Path("pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    named = {name.strip() for layer in layers for name in layer.split("|")}
    packages = {path.parent.name for path in Path("src/trainer").glob("*/__init__.py")}
    modules = {path.stem for path in Path("src/trainer").glob("[!_]*.py")}
    assert {f"trainer.{name}" for name in packages | modules} == named
    picture = Path("README.md").read_text().partition("Imports point down only")[2].split("```")[1]
    assert packages | modules <= set(re.findall(r"\w+", picture))


@pytest.mark.parametrize("module", TORCH_FREE)
def test_imports_without_torch(module):
    code = f"import sys, {module}; print(sorted(set(sys.modules) & {{'torch', 'transformers'}}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "[]", run.stderr


def test_source_has_no_dynamic_attribute_access():
    """Variants are told apart by type: nothing asks whether an attribute is there."""
    found = [
        str(path)
        for path in Path("src").rglob("*.py")
        if "hasattr(" in path.read_text() or "except:" in path.read_text()
    ]
    assert found == []
