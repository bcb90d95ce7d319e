"""The table of frameworks: which one an object belongs to, and that a framework's binding leaves the others alone."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import engine
from engine.collectives import bindings

INSTALLED = [each for each in bindings.BOUND.values() if importlib.util.find_spec(each.package) is not None]

# Frameworks and bindings that importing a binding loads beyond its framework's own.
IMPORTS = """
import sys
from importlib import import_module
from engine.collectives import bindings

own, *others = sys.argv[1:]
roots = {package for each in bindings.FRAMEWORKS for package in (each.package, *each.others.split())}
import_module(own)
before = roots & {name.partition(".")[0] for name in sys.modules}
import_module(f"engine.{own}")
print("frameworks:", sorted(roots & {name.partition(".")[0] for name in sys.modules} - before - {own}))
print("bindings:", sorted(each for each in others if f"engine.{each}" in sys.modules))
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize("framework", INSTALLED, ids=lambda each: each.package)
def test_a_binding_imports_no_framework_but_its_own(framework: bindings.Framework) -> None:
    others = [each.package for each in bindings.FRAMEWORKS if each is not framework]
    command = [sys.executable, "-c", IMPORTS, framework.package, *others]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    allowed = ["optax"] if framework.package == "jax" else []
    assert done.stdout == f"frameworks: {[each for each in allowed if each in done.stdout]}\nbindings: []\n"


def named(module: str, *bases: type) -> type:
    """Return a class that was defined in a module of this name."""
    return type("Adam", bases, {"__module__": module})


@pytest.mark.parametrize(
    ("bases", "package"),
    [
        (["torch.optim.adam"], "torch"),
        (["torch.optim.adam", "__main__"], "torch"),
        (["tensorflow.python.trackable", "keras.src.optimizers.adam", "project.training"], "keras"),
        (["torch.nn", "keras.src.optimizers.adam"], "keras"),
        (["tensorflow.python.training.adam"], "tensorflow"),
        (["optax._src.base"], "jax"),
        (["jaxlib._jax"], "jax"),
        (["mxnet.optimizer.optimizer"], "mxnet"),
        (["project.torch"], None),
        (["torchvision.optim"], None),
    ],
    ids=lambda each: each[0] if isinstance(each, list) else each,
)
def test_an_object_belongs_to_the_framework_of_its_classes(
    bases: list[str], package: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keras precedes its backends, and a class of the program belongs to its bases."""
    rows = {each.package: each for each in bindings.FRAMEWORKS}
    packages = {name: each for each in rows.values() for name in (each.package, *each.others.split())}
    monkeypatch.setattr(bindings, "BOUND", rows)
    monkeypatch.setattr(bindings, "_OF_PACKAGE", packages)
    kind: type = object
    for module in bases:
        kind = named(module, kind)
    found = bindings.framework_of(kind())
    assert (found and found.package) == package


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("adam", "given an object of builtins.str"),
        (None, "given an object of builtins.NoneType"),
        (named("torch.optim.adam"), "given the class torch.optim.adam.Adam: call it to make an optimizer"),
    ],
    ids=["text", "nothing", "class"],
)
def test_what_is_no_optimizer_is_told_what_is(given: object, said: str) -> None:
    with pytest.raises(TypeError, match=said) as caught:
        engine.DistributedOptimizer(given)
    assert all(each.optimizers in str(caught.value) for each in bindings.BOUND.values())
