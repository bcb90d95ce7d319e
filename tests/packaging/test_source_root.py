"""Python looks in the current directory first: in the root of the sources, `import engine` finds the sources."""

from __future__ import annotations

from pathlib import Path

import pytest

from .environments import Environment

pytestmark = pytest.mark.timeout(600)  # the first test builds

WHERE = "import engine, engine_ext.core as core; print(engine.__file__); print(core.__file__)"


def test_installed_package_is_used_from_anywhere_else(installed: Environment) -> None:
    for path in installed.python_says(WHERE).splitlines():
        assert Path(path).is_relative_to(installed.path)


def test_dashboards_are_written_from_the_wheel(installed: Environment) -> None:
    installed.python_says("from engine.launch.cli import main; main(['dashboards', 'export', 'monitoring'])")
    assert (installed.cwd / "monitoring/dashboards/enginerun-ranks.json").stat().st_size > 10_000


def test_every_extension_module_imports_by_itself(installed: Environment) -> None:
    """Modules import in any order with every symbol bound, so that none lacks code that it calls."""
    packages = Path(installed.python_says("import engine_ext; print(engine_ext.__path__[0])")).parent
    # The libraries of frameworks, which are no modules, have names without the interpreter's tag.
    extensions = sorted(path for path in packages.rglob("*.so") if path.name.count(".") > 1)
    assert extensions
    for path in extensions:
        module = ".".join(path.relative_to(packages).with_name(path.name.partition(".")[0]).parts)
        installed.python_says(f"import {module}")


def test_command_is_installed(installed: Environment) -> None:
    script = installed.path / "bin" / "enginerun"
    assert "usage: enginerun" in installed.python_says(
        f"import runpy, sys; sys.argv = ['enginerun', '--help']; runpy.run_path({str(script)!r}, run_name='__main__')"
    )


def test_version_is_that_of_the_distribution(installed: Environment, tree: Path) -> None:
    version = installed.python_says("import engine; print(engine.__version__)")
    assert f"version: '{version}'" in (tree / "meson.build").read_text()


def test_source_root_hides_an_installed_package_and_says_how_to_build(installed: Environment, tree: Path) -> None:
    in_root = Environment(installed.path, tree)
    message = in_root.python_says("import engine; engine.init()", status=1).rpartition("\nImportError: ")[2]
    assert str(tree) in message
    assert "pip install -e . --no-build-isolation" in message


def test_launcher_runs_without_the_extension(installed: Environment, tree: Path) -> None:
    in_root = Environment(installed.path, tree)
    assert "usage: enginerun" in in_root.python_says(
        "import sys; sys.argv = ['enginerun', '--help']; from engine.launch.cli import main; sys.exit(main())"
    )
