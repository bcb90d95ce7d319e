"""Check of the machine's prerequisites before a build. The Makefile runs it with the user's Python."""

import sys

PROBLEMS = []

if sys.version_info < (3, 11):
    PROBLEMS.append("Python 3.11 or newer; this is %s. Choose one with make PYTHON=..." % sys.version.split()[0])
else:
    import importlib.util
    import os
    import shutil
    import sysconfig

    if not sys.platform.startswith("linux"):
        PROBLEMS.append("Linux")
    if not any(shutil.which(name) for name in (os.environ.get("CC", "cc").split()[0], "gcc", "clang")):
        PROBLEMS.append("a C compiler (Debian: apt install gcc)")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        PROBLEMS.append("the headers of Python (Debian: apt install python3-dev)")
    if importlib.util.find_spec("ensurepip") is None:
        PROBLEMS.append("the module venv (Debian: apt install python3-venv)")
    if shutil.which("flock") is None:
        PROBLEMS.append("flock (Debian, Fedora: package util-linux)")

if PROBLEMS:
    sys.exit("This machine lacks what the build needs:\n" + "".join("  - %s\n" % problem for problem in PROBLEMS))
