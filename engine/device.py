"""The GPU of this rank: opened when its first tensor comes, together with all ranks, and closed with the engine.

Nothing of `engine.gpu` is imported before.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from .config import Config
from .errors import DeviceError, WorldError
from .host.patience import Patience
from .logs import logger

if TYPE_CHECKING:
    from .gpu.plane import Plane
    from .native import core

LEAVING = 2.0  # seconds for which the other ranks are waited for, whose GPUs may still read from this one's


class Device:
    """What `core.Engine` calls when it is given a tensor of a GPU that is not open.

    Parameters
    ----------
    engine : core.Engine
        Of the world.
    crew : collection of int
        The ranks of this host.
    settings : Config
    """

    def __init__(self, engine: core.Engine, crew: Collection[int], settings: Config) -> None:
        self._engine = engine
        self._crew = crew
        self._settings = settings
        self._lock = threading.RLock()
        self._plane: Plane | None = None
        self._opening = self._used = self._closed = False
        self._rooms: threading.Thread | None = None
        engine.opener = self.open

    def open(self, ordinal: int) -> None:
        """Open the GPU with this number, or refuse it if another is open. Collective if none is.

        Raises
        ------
        DeviceError, WorldError, ForkedError
            As `Plane.open`.
        UnsupportedTensorError
            The rank works on another GPU.
        """
        from .gpu.plane import Plane

        with self._lock:
            if self._opening:  # by this thread: this is a signal handler
                raise DeviceError("the GPU is being opened by the code that this one has interrupted")
            if self._closed:
                raise DeviceError("the engine has been shut down")
            if self._plane is None:
                self._opening = True
                try:
                    self._plane = Plane.open(self._engine, ordinal, self._settings)
                finally:
                    self._opening = False
            if self._rooms is None:
                # A thread of its own, as it waits for the framework's allocator, and that, at times, for the GPU.
                rooms = threading.Thread(target=self._engine.make_rooms, name="engine-rooms", daemon=True)
                rooms.start()
                self._rooms = rooms
            if not self._used:  # Nor is it after an interrupt right behind the opening.
                self._engine.use(self._plane.lane)
                self._used = True
                if self._engine.rank == 0:
                    logger.warning(
                        "tensors on GPUs are reduced by NCCL; this has been tried with stand-ins for CUDA and NCCL, "
                        "and never yet on a GPU: compare the first results with those of tensors in the host's memory"
                    )
            self._plane.expect(ordinal)

    def close(self) -> None:
        """Let go of the GPU. The engine is closed, and nothing runs on the device any more.

        What NCCL frees may be what kernels of other ranks of this host still read. A rank says that it has left when
        its device has come to rest.
        """
        self._engine.opener = None
        with self._lock:
            self._closed = True
        if self._plane is None:
            return
        self._engine.close_rooms()
        if self._rooms is not None:
            self._rooms.join(LEAVING)
        patience = Patience(LEAVING)
        while patience.left() and not self._all_have_left():
            time.sleep(0.005)
        self._plane.close()
        self._engine.bury()

    def _all_have_left(self) -> bool:
        failure = self._engine.failure
        culprit = failure.rank if isinstance(failure, WorldError) else None  # who may never leave
        ranks = [each for each in self._engine.ranks() if each["rank"] in self._crew]
        return all(each["left"] or each["rank"] == culprit for each in ranks)
