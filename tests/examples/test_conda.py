"""The conda recipe of the examples, as rattler-build reads, renders and builds it: from stand-ins for a channel."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("rattler_build", reason="needs the dev extra")

import rattler_build as builder
from rattler_build.tool_config import PlatformConfig

from . import conda_channel

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


@pytest.mark.slow
@pytest.mark.timeout(1800)  # a whole build of the engine
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the stand-ins are for x86-64")
def test_recipe_builds_a_package_that_passes_its_own_tests(tmp_path: Path) -> None:
    channel = conda_channel.write_channel(tmp_path)
    variants = re.sub(r"python: .*", f'python: ["{conda_channel.VERSION}.*"]', VARIANTS)
    config = builder.RenderConfig(platform=PlatformConfig(target_platform="linux-64"))
    (variant,) = builder.Stage0Recipe.from_file(str(RECIPE)).render(builder.VariantConfig.from_yaml(variants), config)
    built = variant.run_build(channels=[channel], output_dir=tmp_path / "output")
    package = builder.Package.from_file(built.packages[0])
    assert set(package.depends) == {"numpy >=1.26", "python >=3.11"}
    results = package.run_tests(channel=[channel])
    assert len(results) == 2 and all(each.success for each in results), [each.output for each in results]


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
