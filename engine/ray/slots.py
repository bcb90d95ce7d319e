"""Slots for workers of an elastic job: one placement group for each, as many as the cluster has room for.

Groups without room yet make an autoscaler add nodes. A thread asks Ray twice a second which groups exist on which
nodes, so that nothing else waits for Ray.
"""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors.formatting import format_exception
from ..text.logs import logger
from .settings import Hosts

EVERY = 0.5  # seconds between two queries
SHARE = 0.001  # amount of a node's own resource that pins a group to that node


class Holder:
    """Actor that holds the GPUs of a slot."""

    def list_gpus(self) -> list[str]:
        """Return the GPUs that Ray has assigned to this actor."""
        return list(ray.get_runtime_context().get_accelerator_ids().get("GPU", ()))


@dataclass
class _Slot:
    group: PlacementGroup
    pinned: str  # address of the node that it must be on; empty: any node
    node: str = ""
    holder: Any = None
    asked: Any = None  # reference to the holder's answer with its GPUs
    gpus: list[str] = field(default_factory=list)
    since: float = math.inf  # ascending number that orders the slots of a node by their arrival

    @property
    def ready(self) -> bool:
        """True if a worker can be started in the slot."""
        return self.since < math.inf


class ClusterSlots:
    """Requests slots from Ray, and tracks which ones exist. Between `open` and `close` it has a thread.

    It requests at least `least` slots and at most `most`. Unless `bounded` is set, no more are requested than may find
    room, but at least one more than exist. `hosts` is the user's discovery: how many slots to request on which nodes.
    """

    def __init__(
        self, per_slot: dict[str, float], least: int, most: int, bounded: bool, hosts: Hosts | None = None
    ) -> None:
        self.per_slot = per_slot  # resources of each slot: `CPU`, and `GPU` if it needs any
        self._least, self._most, self._bounded = least, most, bounded
        self._hosts = hosts
        self._slots: list[_Slot] = []
        self._lock = threading.Lock()
        self._found: dict[str, list[_Slot]] = {}
        self._nodes: dict[str, str] = {}
        self._looked = threading.Condition()
        self._looks = 0
        self._numbered = 0
        self._unknown: set[str] = set()  # unknown names of the user's discovery that were logged
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def open(self) -> None:
        """Start to request and track slots."""
        self._thread = threading.Thread(target=self._watch_cluster, name="engine-ray-slots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Give all slots back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(10 * EVERY)
            self._thread = None
        slots, self._slots = self._slots, []
        for slot in slots if ray.is_initialized() else ():  # ray.shutdown() has removed them already
            self._give_back(slot)

    @property
    def found(self) -> dict[str, int]:
        """Number of slots of each node, by `NODE@ADDRESS`."""
        with self._lock:
            return {host: len(slots) for host, slots in self._found.items()}

    def get_node(self, host: str) -> str:
        """Return Ray's id of a node."""
        return self._nodes[host]

    def list_gpus(self, host: str) -> list[list[str]]:
        """Return the GPUs of all slots of a node, by slot."""
        with self._lock:
            return [slot.gpus for slot in self._found.get(host, ())]

    def wait_until_settled(self, seconds: float) -> int:
        """Wait until all requested slots exist, or no more come for a second; return their number."""
        before, quiet = -1, 0.0
        while seconds > 0:
            with self._looked:
                looks = self._looks
                self._looked.wait_for(lambda looks=looks: self._looks > looks, 4 * EVERY)  # type: ignore[misc]
            seconds -= EVERY
            there = sum(self.found.values())
            quiet = quiet + EVERY if there == before and there >= self._least else 0.0
            before = there
            if there >= self._most or quiet >= 1.0:
                break
        return max(before, 0)

    # ---- the thread

    def _watch_cluster(self) -> None:
        trouble = ""
        while ray.is_initialized() and not self._stop.is_set():  # otherwise Ray's functions would connect again
            try:
                self._update_slots()
                trouble = ""
            except Exception as error:  # of Ray or of the user's discovery: the last answer stays valid
                if (told := format_exception(error)) != trouble:
                    trouble = told
                    logger.warning("the slots of the cluster cannot be told, the last answer counts: %s", told)
            with self._looked:
                self._looks += 1
                self._looked.notify_all()
            self._stop.wait(EVERY)

    def _update_slots(self) -> None:
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        if not ray.is_initialized():
            return
        table = placement_group_table()
        for slot in self._slots:
            entry = table.get(slot.group.id.hex(), {})
            node = str(entry.get("bundles_to_node_id", {}).get(0, "")) if entry.get("state") == "CREATED" else ""
            if node != slot.node:
                self._record_move(slot, node)
        self._ask_for(self._count_wanted(alive))
        found: dict[str, list[_Slot]] = {}
        for slot in self._slots:
            node = slot.node
            if node in alive and self._is_ready(slot):
                host = f"{node[:8]}@{alive[node]['NodeManagerAddress']}"
                self._nodes[host] = node
                found.setdefault(host, []).append(slot)
        with self._lock:  # a slot keeps its position, by which its GPUs are found
            self._found = {host: sorted(slots, key=lambda slot: slot.since) for host, slots in found.items()}

    def _count_wanted(self, alive: Mapping[str, dict[str, Any]]) -> Counter[str]:
        """Return how many slots to request, by the address of the node that they must be on; empty: any node."""
        if self._hosts is None:
            if self._bounded:
                return Counter({"": self._most})
            free = ray.available_resources()
            more = min(int(free.get(kind, 0) // amount) for kind, amount in self.per_slot.items())
            there = sum(bool(slot.node) for slot in self._slots)
            # Requests without room are withdrawn one at a time: some may be about to be placed.
            asked = max(there + max(1, more), len(self._slots) - 1)
            return Counter({"": min(self._most, max(self._least, asked))})
        addresses = {
            name: node["NodeManagerAddress"]
            for node in alive.values()
            for name in (node["NodeManagerHostname"], node["NodeManagerAddress"])
        }
        wanted: Counter[str] = Counter()
        for name, slots in self._hosts.find_available_hosts_and_slots().items():
            if name in addresses:
                wanted[addresses[name]] += min(slots, self._most - wanted.total())
            elif name not in self._unknown:
                self._unknown.add(name)
                known = ", ".join(sorted(addresses))
                logger.warning("the discovery tells of %r, which is no node of the cluster yet: %s", name, known)
        return wanted

    def _ask_for(self, wanted: Counter[str]) -> None:
        lacking = wanted.copy()
        for slot in sorted(self._slots, key=lambda slot: slot.since):
            if lacking[slot.pinned] > 0:
                lacking[slot.pinned] -= 1
            else:
                self._slots.remove(slot)
                self._give_back(slot)
        for address in lacking.elements():
            pin = {f"node:{address}": SHARE} if address else {}
            self._slots.append(_Slot(placement_group([{**self.per_slot, **pin}]), address))

    def _record_move(self, slot: _Slot, node: str) -> None:
        """Record that a slot was placed on a node, or that its node is lost and Ray places it again."""
        slot.node, slot.since, slot.gpus, slot.asked = node, math.inf, [], None
        if slot.holder is not None:
            ray.kill(slot.holder)
            slot.holder = None

    def _is_ready(self, slot: _Slot) -> bool:
        """Return whether everything about a slot is known that its worker needs."""
        if slot.ready:
            return True
        if "GPU" not in self.per_slot:
            slot.since = self._next()
            return True
        if slot.holder is None:
            where = PlacementGroupSchedulingStrategy(slot.group, 0)
            kind = ray.remote(num_cpus=0, num_gpus=self.per_slot["GPU"])(Holder)
            slot.holder = kind.options(scheduling_strategy=where).remote()
            slot.asked = slot.holder.list_gpus.remote()
        if ray.wait([slot.asked], timeout=0)[0]:
            try:
                slot.gpus, slot.since = ray.get(slot.asked), self._next()
            except RayError:
                self._record_move(slot, slot.node)
        return slot.ready

    def _next(self) -> int:
        self._numbered += 1
        return self._numbered

    def _give_back(self, slot: _Slot) -> None:
        if slot.holder is not None:
            ray.kill(slot.holder)
        remove_placement_group(slot.group)
