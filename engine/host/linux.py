"""System calls of Linux that some builds of Python lack, and advice for users whose system refuses one.

Python offers `os.memfd_create` and `os.pidfd_open` only if it was built with a C library and kernel headers that had
them. Builds for many distributions, such as those of conda and uv, use older ones. This module asks the running
kernel instead.
"""

from __future__ import annotations

import ctypes
import errno
import os
import resource
import stat

# System call numbers by machine, as in the kernel's tables. Calls since Linux 5.1 have one number on all machines.
_MEMFD_CREATE = {"x86_64": 319, "aarch64": 279, "riscv64": 279, "loongarch64": 279, "ppc64le": 360, "s390x": 350}
_PIDFD_OPEN = 434
_MFD_CLOEXEC = 1
# Errors with which a kernel, a seccomp filter or a security module refuses a call as a whole.
_REFUSED = (errno.EPERM, errno.ENOSYS, errno.EACCES)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def memfd_create(name: str) -> int:
    """Create an anonymous file in memory, and return its descriptor, closed on exec.

    /proc shows its target as `/memfd:name`. If the kernel refuses, `explain_refusal` gives the remedy for the OSError.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, _MFD_CLOEXEC)
    number = _MEMFD_CREATE.get(os.uname().machine)
    if number is None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))
    return _make_system_call(number, ctypes.c_char_p(name.encode()), ctypes.c_uint(_MFD_CLOEXEC))


def pidfd_open(pid: int) -> int:
    """Open a descriptor of a process, closed on exec, which becomes readable when the process has ended.

    OSError: there is no such process, or the kernel refuses, as `explain_refusal` explains.
    """
    if hasattr(os, "pidfd_open"):
        return os.pidfd_open(pid)
    return _make_system_call(_PIDFD_OPEN, ctypes.c_int(pid), ctypes.c_uint(0))


def open_empty_input() -> int:
    """Open an input without content: /dev/null, or an empty file in memory where that is a plain file.

    It is one in some containers, and holds what others have written there.
    """
    descriptor = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    if not stat.S_ISCHR(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        descriptor = memfd_create("empty")
    return descriptor


def open_standard_descriptors() -> None:
    """Open the closed ones among descriptors 0 to 2 on /dev/null.

    Otherwise a process started without them would use their numbers for memory and sockets, and a library that writes
    to standard error would write into those.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:  # the kernel returns the lowest free number
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def explain_refusal(call: str, error: OSError) -> str:
    """Explain why a system call failed, and the remedy: a clause without a capital letter and a full stop."""
    text = f"the system refuses {call} ({error.strerror})"
    if error.errno in _REFUSED:
        return (
            f"{text}: it needs Linux 5.3 or newer, and a sandbox whose seccomp profile allows {call}; in Docker add it "
            "to the profile, or run with --security-opt seccomp=unconfined"
        )
    limit = name_limit(error)
    return f"{text}: raise {limit}" if limit else text


def name_limit(error: OSError) -> str:
    """Return the limit that a system call has reached, such as `'ulimit -n', which is 100`; empty if none."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return f"'ulimit -n', which is {resource.getrlimit(resource.RLIMIT_NOFILE)[0]}"
    if error.errno == errno.EFBIG:
        return f"'ulimit -f', which allows files of {resource.getrlimit(resource.RLIMIT_FSIZE)[0]} bytes"
    return ""


def explain_error(error: OSError) -> str:
    """Format an error: the system's text, the file concerned, and the limit reached, if any."""
    file = f" ({error.filename})" if error.filename is not None else ""
    return explain_briefly(error, file)


def explain_briefly(error: OSError, about: str = "") -> str:
    """Format an error without its file; `about` is appended to the system's text."""
    text = error.strerror or str(error) or type(error).__name__
    limit = name_limit(error)
    return f"{text}{about}" + (f": raise {limit}" if limit else "")


def reserve_descriptors(count: int) -> None:
    """Make room for `count` more open files in this process, by raising its soft limit as far as needed.

    If the hard limit is too low, it raises an OSError with EMFILE.
    """
    wanted = len(os.listdir("/proc/self/fd")) + count
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft in (resource.RLIM_INFINITY,) or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _make_system_call(number: int, *arguments: object) -> int:
    """Make a system call by its number."""
    result = int(_libc.syscall(ctypes.c_long(number), *arguments))
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return result
