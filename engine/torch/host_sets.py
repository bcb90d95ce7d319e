"""Process sets of the ranks on one host."""

from __future__ import annotations

from ..collectives.process_sets import WAITING, ProcessSet, global_process_set
from ..errors import EngineError
from ..session import runtime


def host_process_set() -> ProcessSet:
    """Form a process set of the ranks of each host, and return that of this rank's host. Collective over the world.

    With one host it is the global set. In an elastic job the ranks of a host may change from world to world, so each
    call of the function that `elastic.run` wraps calls this anew. Sets that exist already are used again.

    Returns
    -------
    ProcessSet
        For `DistributedOptimizer(process_set=...)`, which then reduces gradients within the host.

    Raises
    ------
    EngineError
        This process waits for a world of an elastic job.
    NotInitializedError
        `init` has not been called.
    """
    if runtime.is_waiting():
        raise EngineError(f"host_process_set(): the hosts of ranks are not known yet; {WAITING}")
    session = runtime.current_session()
    crews = session.layout.crews
    if len(crews) == 1:
        return global_process_set
    present = {tuple(each.ranks): each for each in session.sets.added}
    sets = [present.get(tuple(crew)) or runtime.add_process_set(crew) for crew in crews]
    return sets[session.layout.hosts[session.world.rank]]
