"""Fork server for members of worlds: a newcomer needs milliseconds, not the seconds in which torch is imported.

Its arguments are modules that members use. Its standard input is a socket. A packet of JSON with one descriptor asks
for a member; the answer is the pid of the process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import socket
import sys

import torch

import engine.torch  # noqa: F401
from tests.elastic import member, programs  # noqa: F401


def warm_up() -> None:
    """Make torch import what it imports at its first use."""
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.step()


def serve() -> None:
    """Serve requests until the other side closes the socket."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    warm_up()
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # The collector of a forked process scans only the process's own objects.
    with socket.socket(fileno=0) as asked:
        asked.send(b"{}")
        while True:
            data, descriptors, _, _ = socket.recv_fds(asked, member.LIMIT, 1)
            if not data:
                return
            request = json.loads(data)
            pid = os.fork()
            if pid == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                code = 1
                try:
                    null = os.open(os.devnull, os.O_RDONLY)
                    os.dup2(null, 0)
                    os.close(null)
                    asked.detach()
                    member.main(**request, connection=socket.socket(fileno=descriptors[0]))
                    code = 0
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            os.close(descriptors[0])
            asked.send(json.dumps({"pid": pid}).encode())


if __name__ == "__main__":
    serve()
