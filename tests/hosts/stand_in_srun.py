"""Stand-in for Slurm's srun: starts processes on hosts, with the variables by which srun tells them their places.

    STAND_IN_ENTER='ip netns exec x-{host}' python stand_in_srun.py --nodelist=a,b --ntasks-per-node=2 COMMAND ...

Nodes and tasks of an allocation are the defaults: `SLURM_JOB_NODELIST` (names with commas) and `SLURM_NTASKS_PER_NODE`.
Nodes are numbered in the order of the list, and tasks node by node, as with `--distribution=block`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys


def main() -> int:
    """Start the tasks of one step, and wait for them; return the largest exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nodelist", default=os.environ.get("SLURM_JOB_NODELIST", ""))
    parser.add_argument("--ntasks-per-node", type=int, default=os.environ.get("SLURM_NTASKS_PER_NODE", "1"))
    parser.add_argument("--kill-on-bad-exit", type=int, default=0, help="accepted; all tasks are waited for")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    nodes, each = given.nodelist.split(","), given.ntasks_per_node
    step = {
        "JOB_ID": os.getpid(),
        "STEP_ID": 0,
        "NTASKS": len(nodes) * each,
        "STEP_NUM_TASKS": len(nodes) * each,
        "STEP_NUM_NODES": len(nodes),
        "STEP_NODELIST": given.nodelist,
        "STEP_TASKS_PER_NODE": f"{each}(x{len(nodes)})" if len(nodes) > 1 else str(each),
    }
    tasks = []
    for number, node in enumerate(nodes):
        enter = os.environ["STAND_IN_ENTER"].format(host=node).split()
        for local in range(each):
            place = {"PROCID": number * each + local, "LOCALID": local, "NODEID": number}
            variables = {f"SLURM_{name}": str(value) for name, value in (step | place).items()}
            environ = {**os.environ, **variables, "SLURMD_NODENAME": node}
            tasks.append(subprocess.Popen([*enter, *given.command], env=environ))
    return max(task.wait() for task in tasks)


if __name__ == "__main__":
    sys.exit(main())
