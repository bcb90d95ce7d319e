"""Common part of all bindings, which a framework's binding extends.

CONTRIBUTING.md lists the parts of a binding; `tests/frameworks/fake_framework.py` is a complete example.
"""
