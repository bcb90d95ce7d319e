"""The conda recipe of the examples, as rattler-build reads and renders it. No package is built from it here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

builder = pytest.importorskip("rattler_build", reason="needs the dev extra")
PlatformConfig = pytest.importorskip("rattler_build.tool_config").PlatformConfig

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "examples" / "deploy" / "conda" / "recipe.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
VARIANTS = """
python: ["3.11.* *_cpython", "3.14.* *_cp314"]
c_compiler: [gcc]
c_stdlib: [sysroot]
"""


def render(platform: str) -> list[dict[str, Any]]:
    """Return the recipe's packages for a platform, one for each Python."""
    recipe = builder.Stage0Recipe.from_file(str(RECIPE))
    config = builder.RenderConfig(platform=PlatformConfig(target_platform=platform))
    return [each.recipe.to_dict() for each in recipe.render(builder.VariantConfig.from_yaml(VARIANTS), config)]


@pytest.mark.parametrize("platform", ["linux-64", "linux-aarch64"])
def test_recipe_makes_a_package_for_each_python(platform: str) -> None:
    packages = render(platform)
    assert {each["build"]["string"][:5] for each in packages} == {"py311", "py314"}
    (version,) = re.findall(r"^  version: '(.+)',$", (ROOT / "meson.build").read_text(), re.MULTILINE)
    assert {each["package"]["version"] for each in packages} == {version}
    assert {each["about"]["license"] for each in packages} == {PROJECT["project"]["license"]}


def names_and_bounds(requirements: list[str]) -> dict[str, str]:
    """Split requirements of Python's or conda's form into names and bounds."""
    found = [re.fullmatch(r"([\w-]+) *(\S*)", each.lower()) for each in requirements]
    return {each[1]: each[2] for each in found if each}


def test_requirements_are_those_of_the_project() -> None:
    requirements = render("linux-64")[0]["requirements"]
    project = PROJECT["project"]
    assert names_and_bounds(requirements["run"]) == names_and_bounds(project["dependencies"]) | {
        "python": project["requires-python"]
    }
    needed = names_and_bounds(PROJECT["build-system"]["requires"])
    assert needed.items() <= names_and_bounds(requirements["host"]).items()


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [(("run:", "runs:"), "unknown field 'runs'"), (("license: Apache-2.0", "license: Apache 2"), "SPDX")],
)
def test_wrong_recipe_is_refused(wrong: tuple[str, str], complaint: str) -> None:
    """The reader is the linter: what it passes has only fields that there are, and a licence with a known name."""
    with pytest.raises(builder.RecipeParseError, match=complaint):
        builder.Stage0Recipe.from_yaml(RECIPE.read_text().replace(*wrong))
