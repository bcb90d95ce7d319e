"""A training step over several hosts: its recorded course, replayed over a model of the network. Pure functions.

The program of a rank, the time within a host, and when tensors become ready are as recorded. Between hosts the model
assumes:

- every host does what the recorded one did, at the same moments, and has one link, which its L ranks share;
- an allreduce is a two-shot direct exchange: each rank sends to every rank elsewhere the part that this one adds up,
  and then its own sum to every other host. Of S bytes a link carries (L + 1) S (H - 1) / H in each direction, in two
  network steps. Or it passes along a chain of hosts, where that moves less: 2 S, and S with two hosts, in 2 H - 2
  network steps, which the chunks of an entry take one after another (`engine_ext/operations/chain.pyx`);
- entries follow one another, chunks of an entry are pipelined, and before an entry begins the coordinator's host has
  heard of the tensors and the others of the entry: two more one-way trips;
- tensors fuse by the engine's rule (`engine_ext/control/fusion.pyx`), at the moments that were recorded.

Nothing else costs anything: no packet is lost, no other traffic passes, and the processors keep up with the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 4  # chunks of an entry that are on their way at once, as engine_ext/shared/layout.h has slots
MOST_TENSORS = 8192  # in one entry: BATCH_ITEMS of layout.h
LAG = SLOTS // 2  # chunks by which a host of a chain is behind the one before it
CHUNKS_A_LEG = 4  # of a chain, at least, if they are no smaller than
SMALLEST_CHUNK = 1 << 16
AUTO_BYTES = 1 << 20  # for each leg, below which no chain is chosen
TRIPS_OF_CONTROL = 2  # one-way, before an entry begins: the tensors are ready, and the entry


@dataclass(frozen=True)
class Network:
    """Links between hosts.

    Attributes
    ----------
    bandwidth : float
        Bits a second of one host's link, in each direction; may be infinite.
    latency : float
        Seconds of one trip from host to host.
    """

    bandwidth: float
    latency: float


IDEAL = Network(math.inf, 0.0)


@dataclass(frozen=True)
class Rules:
    """The knobs that decide how tensors fuse and pass.

    Attributes
    ----------
    fusion_threshold : int
        Bytes at which a batch closes.
    cycle_time : float
        Seconds for which a batch may wait for more tensors.
    chunk_bytes : int
    between_hosts : str
        "direct" or "chain" for all allreduces; any other chooses for each, as "auto" does.
    """

    fusion_threshold: int
    cycle_time: float
    chunk_bytes: int
    between_hosts: str = "auto"


@dataclass(frozen=True)
class Tensor:
    """A tensor of a step. Times in seconds since the step's begin.

    Attributes
    ----------
    ready, started, ended : float
        Submitted by all ranks of the host; its entry begun; its entry done within the host.
    nbytes : float
        As it travels, from one host.
    kind : str
        The operation.
    compression : str
        Tensors that travel in different dtypes do not fuse.
    """

    ready: float
    started: float
    ended: float
    nbytes: float
    kind: str = "allreduce"
    compression: str = "none"


@dataclass(frozen=True)
class Step:
    """One recorded step: its length, its tensors, and when the program waited, in order."""

    seconds: float
    tensors: tuple[Tensor, ...]
    waits: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Batch:
    """Tensors of one entry; `closed` is when the coordinator appended it. The rest is as in `Tensor`."""

    closed: float
    started: float
    ended: float
    nbytes: float
    kind: str
    compression: str = "none"


@dataclass(frozen=True)
class Cluster:
    """Where a step is replayed.

    Attributes
    ----------
    hosts : int
        At least 1.
    ranks : int
        On each host.
    network : Network
    """

    hosts: int
    ranks: int
    network: Network


@dataclass(frozen=True)
class Prediction:
    """A step on some hosts.

    Attributes
    ----------
    hosts : int
    seconds : float
        The step.
    busy : float
        Seconds for which a host's link carries data, in each direction.
    nbytes : float
        That a host sends.
    """

    hosts: int
    seconds: float
    busy: float
    nbytes: float


def link_share(kind: str, hosts: int, ranks: int = 1) -> float:
    """Bytes that a host sends for each byte of an operation.

    Parameters
    ----------
    kind : str
    hosts : int
        At least 1.
    ranks : int
        On each host.

    Returns
    -------
    float
        It grows with the hosts. What is not known passes as an allreduce does.
    """
    others = (hosts - 1) / hosts
    shares = {
        "allgather": hosts - 1.0,  # what the ranks of each host have goes to every other
        "alltoall": others,
        "barrier": 0.0,
        "broadcast": hosts - 1.0,  # from the root's host to every other
        "reducescatter": ranks * others,
        "skip": 0.0,
    }
    return shares.get(kind, (ranks + 1) * others)


def network_steps(kind: str) -> int:
    """One-way trips of a chunk."""
    return {"barrier": 0, "skip": 0, "allgather": 1, "alltoall": 1, "broadcast": 1, "reducescatter": 1}.get(kind, 2)


def growth(compression: str) -> int:
    """Bytes of a sum that a chain hands on, for each byte of what is summed: sums of 16 bits travel as float32."""
    return 1 if compression == "none" else 2


def chain_share(hosts: int, compression: str = "none") -> float:
    """Bytes that the busiest host of a chain sends for each byte of an allreduce: a sum, and the result."""
    return growth(compression) + (0.0 if hosts == 2 else 1.0)


def goes_by_chain(batch: Batch, rules: Rules, hosts: int, ranks: int) -> bool:
    """Whether the sums of an entry pass from host to host."""
    if batch.kind != "allreduce" or hosts == 1 or rules.between_hosts == "direct":
        return False
    if rules.between_hosts == "chain":
        return True
    large = batch.nbytes >= _legs(hosts) * AUTO_BYTES
    return large and chain_share(hosts, batch.compression) < link_share(batch.kind, hosts, ranks)


def _legs(hosts: int) -> int:
    """Network steps of a chain: once along it for the sums, once for the result."""
    return 2 * hosts - 2


# ---- fusion ---------------------------------------------------------------------------------------------------------


def fuse(step: Step, rules: Rules) -> list[Batch]:
    """Batches of a step by the engine's rule, in the order of the schedule.

    A batch closes when it reaches the threshold, when its first tensor has waited for the cycle time, with the last
    tensor of the step, and while the program waits: at once, or with the last tensor that becomes ready meanwhile.
    """
    tensors = sorted(step.tensors, key=lambda tensor: tensor.ready)
    moments = sorted(_last_ready(tensors, begun, ended) for begun, ended in step.waits)
    batches: list[Batch] = []
    queue: list[Tensor] = []
    queued = 0.0  # bytes
    at = 0
    for number, tensor in enumerate(tensors):
        while queue:
            while at < len(moments) and moments[at] < queue[-1].ready:
                at += 1
            due = queue[0].ready + rules.cycle_time
            if at < len(moments):
                due = min(due, moments[at])
            if due >= tensor.ready:
                break
            batches += _close(queue, due, rules)
            queue, queued = [], 0.0
        queue.append(tensor)
        queued += tensor.nbytes
        last = number == len(tensors) - 1
        if last or queued >= rules.fusion_threshold or len(queue) >= MOST_TENSORS:
            batches += _close(queue, tensor.ready, rules)
            queue, queued = [], 0.0
    return batches


def _last_ready(tensors: Sequence[Tensor], begun: float, ended: float) -> float:
    """When a waiting program closes the open batch."""
    return max((tensor.ready for tensor in tensors if begun < tensor.ready <= ended), default=begun)


def _close(queue: list[Tensor], moment: float, rules: Rules) -> list[Batch]:
    """One batch for each set of tensors that fuse, none above the threshold, but for a tensor that is so alone."""
    batches = []
    while queue:
        first, nbytes = queue[0], 0.0
        members: list[Tensor] = []
        others: list[Tensor] = []
        for tensor in queue:
            fits = tensor.kind == first.kind and tensor.compression == first.compression
            if not members or (fits and nbytes + tensor.nbytes <= rules.fusion_threshold):
                members.append(tensor)
                nbytes += tensor.nbytes
            else:
                others.append(tensor)
        started = max(moment, min(tensor.started for tensor in members))
        ended = max(started, max(tensor.ended for tensor in members))
        batches.append(Batch(moment, started, ended, nbytes, first.kind, first.compression))
        queue = others
    return batches


# ---- the network ----------------------------------------------------------------------------------------------------


def predict(step: Step, rules: Rules, hosts: int, network: Network, ranks: int = 1) -> Prediction:
    """A step on some hosts.

    Parameters
    ----------
    step : Step
        As recorded on one host.
    rules : Rules
    hosts : int
        At least 1.
    network : Network
    ranks : int
        On each host.

    Returns
    -------
    Prediction
        Its step is the recorded one and what the network adds: nothing on one host, or if the network is `IDEAL`.
        It grows with the hosts and the latency, and with 1 / bandwidth.
    """
    batches = fuse(step, rules)
    ideal, _ = _replay(batches, step, rules, Cluster(hosts, ranks, IDEAL))
    end, sent = _replay(batches, step, rules, Cluster(hosts, ranks, network if hosts > 1 else IDEAL))
    return Prediction(hosts, step.seconds + max(0.0, end - ideal), 8 * sent / network.bandwidth, sent)


def _replay(batches: Sequence[Batch], step: Step, rules: Rules, cluster: Cluster) -> tuple[float, float]:
    """The end of the step, and the bytes that a host sends.

    What the program waited for is what was done when it went on. If that is done later now, all that follows is later.
    What was not done when the step ended is waited for in the next one, which is as late as that is.
    """
    late = 0.0  # seconds by which the program is behind its recording
    free = 0.0  # when the entry before is done
    sent = 0.0
    pending: list[tuple[float, float]] = []  # of entries nobody has waited for: their recorded end, and that of now
    at = 0
    for until in (*(ended for _, ended in step.waits), step.seconds):
        while at < len(batches) and batches[at].closed <= until:
            batch = batches[at]
            cross = _cross_chain if goes_by_chain(batch, rules, cluster.hosts, cluster.ranks) else _cross
            free, nbytes = cross(batch, late, free, rules, cluster)
            sent += nbytes
            pending.append((batch.ended, free))
            at += 1
        done = [now for recorded, now in pending if recorded <= until]
        pending = [entry for entry in pending if entry[0] > until]
        late = max([late, *(now - until for now in done)])
    late = max([late, *(now - recorded for recorded, now in pending)])
    return step.seconds + late, sent


def _begin(batch: Batch, late: float, free: float, network: Network) -> float:
    """When an entry begins, of which the others have to hear first."""
    return max(batch.closed + late + TRIPS_OF_CONTROL * network.latency, batch.started + late, free)


def _cross(batch: Batch, late: float, free: float, rules: Rules, cluster: Cluster) -> tuple[float, float]:
    """When an entry is done, and the bytes that a host sends for it.

    Within the host its chunks are done evenly from its begin to its end. Each crosses in `passing` seconds and some
    trips; as many as there are slots do so at once.
    """
    network = cluster.network
    chunks = max(1, math.ceil(batch.nbytes / rules.chunk_bytes))
    nbytes = batch.nbytes * link_share(batch.kind, cluster.hosts, cluster.ranks)
    passing = 8 * nbytes / chunks / network.bandwidth
    crossing = passing + network_steps(batch.kind) * network.latency
    begin = _begin(batch, late, free, network)
    local = batch.ended - batch.started
    each = max(passing, crossing / SLOTS)
    last = max(begin + local / chunks + (chunks - 1) * each, begin + local)
    return last + crossing, nbytes


def _cross_chain(batch: Batch, late: float, free: float, rules: Rules, cluster: Cluster) -> tuple[float, float]:
    """The same of an entry whose sums pass from host to host.

    All hosts take its chunks through their stages together, in as many rounds as there are chunks, and `LAG` more for
    each leg: so what a leg sends has `LAG` rounds to arrive. While sums still set out and results already return, a
    host in the middle sends both.
    """
    network, legs = cluster.network, _legs(cluster.hosts)
    chunk = max(SMALLEST_CHUNK, min(rules.chunk_bytes, int(batch.nbytes) // (legs * CHUNKS_A_LEG)))
    chunks = max(1, math.ceil(batch.nbytes / chunk))
    both = max(0, chunks - LAG * cluster.hosts) if cluster.hosts > 2 else 0
    nbytes = batch.nbytes * chain_share(cluster.hosts, batch.compression)
    leg = 8 * batch.nbytes * growth(batch.compression) / chunks / network.bandwidth
    arriving = (leg + network.latency) / LAG
    crossing = both * max(arriving, 8 * nbytes / chunks / network.bandwidth)
    crossing += (chunks + LAG * legs - both) * max(arriving, leg)
    begin = _begin(batch, late, free, network)
    local = batch.ended - batch.started
    return max(begin + local / chunks + crossing, begin + local + leg + network.latency), nbytes
