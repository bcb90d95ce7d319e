"""The common half of all bindings: a framework plugs into the modules of this package.

CONTRIBUTING.md says what a binding brings; `tests/frameworks/fake_framework.py` is one that is complete.
"""
