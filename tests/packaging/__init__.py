"""The sdist, the wheel and the editable installation."""
