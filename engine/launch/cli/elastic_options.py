"""Options of elastic jobs, whose ranks may come and go; they have Horovod's names."""

from __future__ import annotations

import argparse
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ...config.config import Config
from ...config.forms import Whole, make_argument_type, make_duration_form
from ...elastic.limits import JobLimits
from ..errors import LaunchError
from ..hosts.host_list import is_here
from ..hosts.reach import Kept, split_words
from ..process.plan import MOST_RANKS

COUNT = Whole(1)
SLOW_TIME = 60.0  # seconds
TIMEOUT = 600.0  # seconds that a job waits for enough workers, as Horovod's
LEASE = 10.0  # seconds without a message after which the agent kills its workers, and the launcher gives the agent up
LEAST_LEASE = 2.0  # least lease, and least `host_silence`
MARGIN = 1.0  # seconds in which a guardian notices that a lease has expired, and kills the workers


@dataclass(frozen=True)
class Elastic:
    """Options of an elastic job. The sizes and `multiple` are those of `JobLimits`."""

    size: int
    min_size: int
    max_size: int
    multiple: int
    hosts: tuple[tuple[str, int], ...]  # hosts of `-H`, or this one, with their slots; empty with a script
    script: tuple[str, ...]  # words of the host discovery command; empty if hosts are fixed
    slots: int  # slots of a host that the script names without a number
    timeout: float  # seconds that the job waits for `min_size` workers
    reset_limit: int | None  # most resets of the job; None: no limit
    # Least and longest seconds for which a failed host is blacklisted; None: for good
    cooldown: tuple[float, float] | None
    # A slow worker goes: seconds of each step for which the others wait for it, and for how long
    slow: tuple[float, float] | None
    lease: float = LEASE  # seconds without a message of the launcher after which the workers of another host are killed

    @property
    def silence(self) -> float:
        """Longest time in seconds for which ranks wait for a silent host; at most the lease."""
        return min(self.lease, Config.host_silence)

    def spans_hosts(self, names: Collection[str] | None) -> bool:
        """Return whether ranks may be on several hosts; `names` is the same as in `lay_out`."""
        fixed = [name for name, _ in self.hosts if names is None or not is_here(name, names)]
        return bool(self.script) or len(fixed) + (len(fixed) < len(self.hosts)) > 1

    def make_limits(self, start_timeout: float, stall_limit: float, grace: float) -> JobLimits:
        """Return the limits of the driver's machine; raise a `LaunchError` if the options contradict each other.

        All parameters are in seconds. For a stall limit of 0 (none) the default of `JobLimits` is used, because a
        member that never comes back would block all others. Workers must end within `grace` when the user ends the job.
        """
        try:
            return JobLimits(
                size=self.size,
                min_size=self.min_size,
                max_size=self.max_size,
                multiple=self.multiple,
                start_timeout=start_timeout,
                elastic_timeout=self.timeout,
                stall_limit=stall_limit or JobLimits.stall_limit,
                kill_wait=grace + self.lease,
                lease=self.lease + MARGIN,
                reset_limit=self.reset_limit,
                cooldown=self.cooldown,
            )
        except ValueError as error:
            raise LaunchError(f"the job cannot be elastic like that: {_in_options(str(error))}") from None


def add_elastic(parser: argparse.ArgumentParser) -> None:
    """Add the options of elastic jobs.

    The parser's `ignored` collects the names of options that have no effect unless the job is elastic.
    """
    group = parser.add_argument_group(
        "elastic jobs", "--min-np, --max-np or --host-discovery-script makes one, whose program calls elastic.run."
    )
    number, time = make_argument_type(COUNT), make_argument_type(make_duration_form(0.001))
    group.add_argument(
        "--min-np", "--min-num-proc", type=number, metavar="N", help="go on with as few ranks as this (default: -np)"
    )
    group.add_argument(
        "--max-np", "--max-num-proc", type=number, metavar="N", help="grow to as many ranks as this (default: -np)"
    )
    group.add_argument(
        "--host-discovery-script", metavar="FILE", help="prints the hosts that there are now, in lines NAME:SLOTS"
    )

    def add(*names: str, **more: object) -> None:
        group.add_argument(*names, action=Kept, **more)  # type: ignore[arg-type]

    add("--slots-per-host", "--slots", type=number, metavar="N", help="slots of a host that is named without")
    add("--elastic-timeout", type=time, metavar="S", help=f"seconds to wait for --min-np ranks (default {TIMEOUT:g})")
    add(
        "--reset-limit", type=make_argument_type(Whole(0)), metavar="N", help="resets after which the next ends the job"
    )
    add(
        *("--blacklist-cooldown-range",),
        nargs=2,
        type=make_argument_type(make_duration_form(0.0)),
        metavar=("LO", "HI"),
        help="seconds for which a host that fails is left alone, at first and at most (default: for good)",
    )
    add(
        "--lease",
        type=make_argument_type(make_duration_form(LEAST_LEASE)),
        metavar="S",
        help=f"seconds without a word of the launcher after which ranks of another host are killed (default {LEASE:g})",
    )
    add("--np-multiple", type=number, metavar="N", help="numbers of ranks are multiples of this")
    add("--slow-limit", type=time, metavar="S", help="let a worker go for which the others wait so long in each step")
    add("--slow-time", type=time, metavar="S", help=f"seconds for which it has to be so slow (default {SLOW_TIME:g})")


def elastic_of(given: argparse.Namespace, hosts: Sequence[tuple[str, int]] | None) -> Elastic | None:
    """Return the options of an elastic job; None if the job is not elastic.

    A `LaunchError` is raised if they contradict each other.
    """
    script = split_words("--host-discovery-script", given.host_discovery_script)
    size = given.num_proc or (None if hosts is None else sum(slots for _, slots in hosts)) or given.min_np
    if not script and given.min_np is None and given.max_np is None:
        return None
    if script and hosts is not None:
        raise LaunchError("--host-discovery-script and -H, or --hostfile, both name the hosts: give one of the two")
    if size is None:
        raise LaunchError("the number of ranks is missing: give -np N, the ranks at the start")
    least, most = given.min_np or size, given.max_np or size
    size = size if given.num_proc is not None else min(size, most)
    if not least <= size <= most:
        low = f"--min-np {least}" if given.min_np else f"{least}, the --min-np that -np gives"
        high = f"--max-np {most}" if given.max_np else f"{most}, the --max-np that -np gives"
        raise LaunchError(f"-np {size} must lie between {low}, and {high}")
    if most > MOST_RANKS:
        raise LaunchError(f"--max-np {most} is too many: a job has {MOST_RANKS} ranks at most")
    slots = given.slots_per_host or (1 if script else size)
    there = [slots] if hosts is None else [each for _, each in hosts]
    if not script and sum(there) < least:
        raise LaunchError(
            f"there are {sum(there)} slots, and --min-np is {least}: name more, or go on with fewer ranks"
        )
    cooldown = given.blacklist_cooldown_range
    if given.slow_time is not None and given.slow_limit is None:
        raise LaunchError("--slow-time says for how long, and nothing says how slow: give --slow-limit as well")
    return Elastic(
        size=size,
        min_size=least,
        max_size=most,
        multiple=given.np_multiple or 1,
        hosts=() if script else tuple(hosts or (("localhost", slots),)),
        script=script,
        slots=slots,
        timeout=TIMEOUT if given.elastic_timeout is None else given.elastic_timeout,
        reset_limit=given.reset_limit,
        cooldown=None if cooldown is None else (max(cooldown[0], math.ulp(1.0)), cooldown[1]),
        slow=None if given.slow_limit is None else (given.slow_limit, given.slow_time or SLOW_TIME),
        lease=given.lease or LEASE,
    )


def _in_options(text: str) -> str:
    """Replace the names of limits in a text by those of command-line options."""
    for name, option in (
        ("min_size", "--min-np"),
        ("max_size", "--max-np"),
        ("multiple is", "--np-multiple is"),
        ("size is", "-np is"),
        ("size ", "-np "),
        ("cooldown", "--blacklist-cooldown-range"),
    ):
        text = text.replace(name, option)
    return text
