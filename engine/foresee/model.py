"""Model of a training step over several hosts: its recorded course replayed over a modelled network. Pure functions.

The rank's program, the time within a host, and the times at which tensors become ready are as recorded. Between
hosts, the model assumes:

- every host does what the recorded one did, at the same times, and has one link, which its L ranks share;
- a small allreduce is one exchange of all values. A larger one is a two-shot direct exchange: each rank sends to every
  rank of other hosts the part that this rank sums, and then its own sum to every other host. For S bytes, a link
  carries (L + 1) S (H - 1) / H in each direction, in two network steps. Alternatively it goes along a chain of hosts
  if that moves less: 2 S, or S with two hosts, in 2 H - 2 network steps, which the chunks of an entry take one after
  another (`engine_ext/operations/chain.pyx`). Sums that travel as fp8 are made on each host first: 2 S (H - 1) / H,
  and a scale for each 64 bytes (`engine_ext/operations/blocks.pyx`);
- entries follow one another, chunks of an entry are pipelined, and each entry costs two more one-way trips before it
  begins: the coordinator's host learns that the tensors are ready, and the other hosts learn of the entry;
- tensors fuse by the engine's rule (`engine_ext/coordinator/fusion.pyx`), at the recorded times.

Everything else is free: there is no packet loss and no other traffic, and the processors keep up with the link.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SLOTS = 4  # chunks of an entry in flight at once: the number of slots in engine_ext/shared/layout.h
MOST_TENSORS = 8192  # maximum tensors in one entry: BATCH_ITEMS of layout.h
LAG = SLOTS // 2  # chunks by which a host of a chain is behind the previous one
LEAST_CHUNKS = 2  # minimum chunks of a direct exchange, unless they get smaller than SMALLEST_CHUNK
CHUNKS_A_LEG = 4  # minimum chunks for each leg of a chain, unless they get smaller than SMALLEST_CHUNK
SMALLEST_CHUNK = 1 << 16
AUTO_BYTES = 1 << 20  # bytes per leg below which no chain is chosen
ONE_SHOT_BYTES = 1 << 15  # bytes of all ranks together up to which every rank sends everything to all others
FP8_SCALED = 65 / 64  # bytes that travel for each element as fp8, with the scales of blocks of 64
TRIPS_OF_CONTROL = 2  # one-way trips before an entry begins: readiness of the tensors, and the entry


@dataclass(frozen=True)
class Network:
    """Links between hosts."""

    bandwidth: float  # bits per second of one host's link, in each direction; may be infinite
    latency: float  # seconds of one trip from host to host


WIRES = {"fp16": "float16", "bf16": "bfloat16", "fp8": "fp8"}
"""Dtype that travels, by compression."""
_GROWTH = {"float16": 2, "bfloat16": 2, "float8_e4m3fn": 4, "float8_e5m2": 4}
IDEAL = Network(math.inf, 0.0)


@dataclass(frozen=True)
class Rules:
    """Knobs that decide how tensors fuse and travel."""

    fusion_threshold: int  # bytes at which a batch closes
    cycle_time: float  # seconds for which a batch may wait for more tensors
    chunk_bytes: int
    between_hosts: str = "auto"  # "direct" or "chain" for all allreduces; any other value chooses for each, like "auto"


@dataclass(frozen=True)
class Tensor:
    """Tensor of a step. Times are in seconds since the step's begin."""

    ready: float  # submission by the host's last rank
    started: float  # start of its entry
    ended: float  # end of its entry within the host
    nbytes: float  # bytes on the wire, from one host
    kind: str = "allreduce"  # kind of the operation
    compression: str = "none"  # dtype on the wire; tensors with different ones do not fuse
    dtype: str = "float32"  # dtype in memory; likewise
    due: float = 0.0  # moment at which the program needs it, if later than its end
    work: float = math.inf  # seconds of its entry in which the host worked for it, instead of waiting for ranks


@dataclass(frozen=True)
class Step:
    """One recorded step: its length, its tensors, and the intervals in which the program waited, in order."""

    seconds: float
    tensors: tuple[Tensor, ...]
    waits: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Batch:
    """Tensors of one entry; `closed` is the time at which the coordinator appended it. The rest is as in `Tensor`."""

    closed: float
    started: float
    ended: float
    nbytes: float
    kind: str
    compression: str = "none"
    dtype: str = "float32"
    due: float = 0.0
    work: float = math.inf  # at most the time from `started` to `ended`

    @property
    def wire(self) -> str:
        """Dtype that travels, `fp8` included."""
        return WIRES.get(self.compression, self.dtype)


@dataclass(frozen=True)
class Cluster:
    """Cluster on which a step is replayed."""

    hosts: int  # 1 or more
    ranks: int  # number of ranks on each host
    network: Network


@dataclass(frozen=True)
class Prediction:
    """Predicted step on a number of hosts."""

    hosts: int
    seconds: float  # duration of the step
    busy: float  # seconds in which a host's link carries data, in each direction
    nbytes: float  # bytes that a host sends


def link_share(kind: str, hosts: int, ranks: int = 1) -> float:
    """Return the bytes that a host sends for each byte of an operation.

    `hosts` is at least 1, and `ranks` is the number on each host. The ratio grows with the number of hosts. Unknown
    kinds are treated as allreduces.
    """
    others = (hosts - 1) / hosts
    shares = {
        "allgather": hosts - 1.0,  # the data of each host's ranks go to every other host
        "alltoall": others,
        "barrier": 0.0,
        "broadcast": hosts - 1.0,  # from the root's host to every other
        "reducescatter": ranks * others,
        "skip": 0.0,
    }
    return shares.get(kind, (ranks + 1) * others)


def is_one_shot(batch: Batch, hosts: int, ranks: int) -> bool:
    """Return whether every rank sends all values of an entry to every other; as float32 where others travel as fp8."""
    return batch.kind == "allreduce" and batch.nbytes * _one_shot_growth(batch) * hosts * ranks <= ONE_SHOT_BYTES


def _one_shot_growth(batch: Batch) -> int:
    return 4 if batch.compression == "fp8" else 1


def network_steps(batch: Batch, hosts: int, ranks: int) -> int:
    """Return the number of one-way trips of a chunk."""
    if batch.kind == "allreduce":
        return 1 if is_one_shot(batch, hosts, ranks) else 2
    return {"barrier": 0, "skip": 0, "allgather": 1, "alltoall": 1, "broadcast": 1, "reducescatter": 1}.get(
        batch.kind, 2
    )


def direct_share(batch: Batch, hosts: int, ranks: int) -> float:
    """Return the bytes that a host sends for each byte of an entry that passes along no chain.

    Sums that travel as fp8 are made on each host first, so the number of its ranks does not matter.
    """
    if is_one_shot(batch, hosts, ranks):
        return float(_one_shot_growth(batch) * ranks * (hosts - 1))
    if batch.kind == "allreduce" and batch.compression == "fp8":
        return FP8_SCALED * 2 * (hosts - 1) / hosts
    return link_share(batch.kind, hosts, ranks)


def chain_share(hosts: int, wire: str = "float32") -> float:
    """Return the bytes that a chain's busiest host sends for each byte of an allreduce: a partial sum, and the result.

    `wire` is the dtype that travels; partial sums of 16-bit floats travel as float32.
    """
    return _GROWTH.get(wire, 1) + (0.0 if hosts == 2 else 1.0)


def goes_by_chain(batch: Batch, rules: Rules, hosts: int, ranks: int) -> bool:
    """Return whether the sums of an entry go along a chain of hosts."""
    if batch.kind != "allreduce" or hosts == 1 or rules.between_hosts == "direct" or batch.compression == "fp8":
        return False
    if is_one_shot(batch, hosts, ranks):
        return False
    if rules.between_hosts == "chain":
        return True
    large = batch.nbytes >= _count_legs(hosts) * AUTO_BYTES
    return large and chain_share(hosts, batch.wire) < link_share(batch.kind, hosts, ranks)


def _count_legs(hosts: int) -> int:
    """Return the number of network steps of a chain: once along it for the sums, once for the result."""
    return 2 * hosts - 2


# ---- fusion ---------------------------------------------------------------------------------------------------------


def fuse_tensors(step: Step, rules: Rules) -> list[Batch]:
    """Fuse the tensors of a step by the engine's rule, and return the batches in the order of the schedule.

    A batch closes when it reaches the threshold, when its first tensor has waited for the cycle time, and with the last
    tensor of the step. It also closes while the program waits: at once, or with the last tensor that becomes ready
    then.
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
    """Return the time at which a waiting program closes the open batch."""
    return max((tensor.ready for tensor in tensors if begun < tensor.ready <= ended), default=begun)


def _close(queue: list[Tensor], moment: float, rules: Rules) -> list[Batch]:
    """Close one batch for each set of tensors that fuse; only a single tensor may exceed the threshold."""
    batches = []
    while queue:
        first, nbytes = queue[0], 0.0
        members: list[Tensor] = []
        others: list[Tensor] = []
        for tensor in queue:
            fits = _describe_kind(tensor) == _describe_kind(first)
            if not members or (fits and nbytes + tensor.nbytes <= rules.fusion_threshold):
                members.append(tensor)
                nbytes += tensor.nbytes
            else:
                others.append(tensor)
        started = max(moment, min(tensor.started for tensor in members))
        ended = max(started, max(tensor.ended for tensor in members))
        due = max(ended, min(tensor.due for tensor in members))
        work = sum(tensor.work for tensor in members)
        batches.append(Batch(moment, started, ended, nbytes, *_describe_kind(first), due, min(work, ended - started)))
        queue = others
    return batches


def _describe_kind(tensor: Tensor) -> tuple[str, str, str]:
    """Return what tensors of one entry have in common."""
    return tensor.kind, tensor.compression, tensor.dtype


# ---- the network ----------------------------------------------------------------------------------------------------


def predict(step: Step, rules: Rules, hosts: int, network: Network, ranks: int = 1) -> Prediction:
    """Predict a step on a number of hosts.

    The step was recorded on one host; `ranks` is the number on each host. The predicted step is the recorded one plus
    what the network adds: nothing on one host, or if the network is `IDEAL`. It grows with the number of hosts, with
    the latency, and with 1 / bandwidth.
    """
    batches = fuse_tensors(step, rules)
    ideal, _ = _replay_step(batches, step, rules, Cluster(hosts, ranks, IDEAL))
    end, sent = _replay_step(batches, step, rules, Cluster(hosts, ranks, network if hosts > 1 else IDEAL))
    return Prediction(hosts, step.seconds + max(0.0, end - ideal), 8 * sent / network.bandwidth, sent)


def _replay_step(batches: Sequence[Batch], step: Step, rules: Rules, cluster: Cluster) -> tuple[float, float]:
    """Replay a step; return its end, and the bytes that a host sends.

    A wait of the program ended when the entries done by then were done. If these are done later now, all that follows
    is later. Entries that were not done when the step ended delay the next step, by as much as they are late.
    """
    late = 0.0  # seconds by which the program is behind its recording
    free = 0.0  # end of the previous entry
    sent = 0.0
    pending: list[tuple[float, float]] = []  # moments at which entries are needed, and their replayed ends
    at = 0
    for until in (*(ended for _, ended in step.waits), step.seconds):
        while at < len(batches) and batches[at].closed <= until:
            batch = batches[at]
            cross = _cross_chain if goes_by_chain(batch, rules, cluster.hosts, cluster.ranks) else _cross_network
            free, nbytes = cross(batch, late, free, rules, cluster)
            sent += nbytes
            pending.append((batch.due, free))
            at += 1
        done = [now for needed, now in pending if needed <= until]
        pending = [entry for entry in pending if entry[0] > until]
        late = max([late, *(now - until for now in done)])
    late = max([late, *(now - needed for needed, now in pending)])
    return step.seconds + late, sent


def _compute_begin(batch: Batch, late: float, free: float, network: Network) -> float:
    """Return the time at which an entry begins, after the other hosts have learned of it."""
    return max(batch.closed + late + TRIPS_OF_CONTROL * network.latency, batch.started + late, free)


def _cross_network(batch: Batch, late: float, free: float, rules: Rules, cluster: Cluster) -> tuple[float, float]:
    """Return the end of an entry, and the bytes that a host sends for it.

    Within the host, its chunks are done evenly. Each takes `passing` seconds on the link and some trips. As many chunks
    as there are slots do so at once. Each rank sends what it has packed, so that only the host's work delays what is
    sent, while its waits for late ranks pass meanwhile.
    """
    network = cluster.network
    one_shot = is_one_shot(batch, cluster.hosts, cluster.ranks)
    chunks = 1 if one_shot else max(1, math.ceil(batch.nbytes / _direct_chunk(batch, rules)))
    nbytes = batch.nbytes * direct_share(batch, cluster.hosts, cluster.ranks)
    passing = 8 * nbytes / chunks / network.bandwidth
    crossing = passing + network_steps(batch, cluster.hosts, cluster.ranks) * network.latency
    begin = _compute_begin(batch, late, free, network)
    work = min(batch.work, batch.ended - batch.started)
    each = max(passing, crossing / SLOTS)
    last = max(begin + work / chunks + (chunks - 1) * each, begin + work)
    return max(last + crossing, begin + batch.ended - batch.started), nbytes


def _direct_chunk(batch: Batch, rules: Rules) -> int:
    """Return the bytes of a chunk of an entry that passes along no chain; fp8 has chunks for all slots."""
    if batch.kind != "allreduce":
        return rules.chunk_bytes
    least = SLOTS if batch.compression == "fp8" else LEAST_CHUNKS
    return max(SMALLEST_CHUNK, min(rules.chunk_bytes, int(batch.nbytes) // least))


def _cross_chain(batch: Batch, late: float, free: float, rules: Rules, cluster: Cluster) -> tuple[float, float]:
    """Return the same as `_cross_network` for an entry whose sums go along a chain of hosts.

    All hosts take its chunks through their stages together, in as many rounds as there are chunks, and `LAG` more for
    each leg. So data sent over a leg have `LAG` rounds to arrive. While sums still start and results already return, a
    host in the middle sends both.
    """
    network, legs = cluster.network, _count_legs(cluster.hosts)
    chunk = max(SMALLEST_CHUNK, min(rules.chunk_bytes, int(batch.nbytes) // (legs * CHUNKS_A_LEG)))
    chunks = max(1, math.ceil(batch.nbytes / chunk))
    both = max(0, chunks - LAG * cluster.hosts) if cluster.hosts > 2 else 0
    nbytes = batch.nbytes * chain_share(cluster.hosts, batch.wire)
    leg = 8 * batch.nbytes * _GROWTH.get(batch.wire, 1) / chunks / network.bandwidth
    arriving = (leg + network.latency) / LAG
    crossing = both * max(arriving, 8 * nbytes / chunks / network.bandwidth)
    crossing += (chunks + LAG * legs - both) * max(arriving, leg)
    begin = _compute_begin(batch, late, free, network)
    local = batch.ended - batch.started
    return max(begin + local / chunks + crossing, begin + local + leg + network.latency), nbytes
