"""Thread counts and CPU sets, computed from given facts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.host import machine
from engine.host.machine import Facts
from engine.launch.errors import LaunchError
from engine.launch.process.cpu_binding import allot_cpus

pytestmark = pytest.mark.quick

EIGHT = tuple(range(8))


@pytest.mark.parametrize(
    ("cpus", "quota", "ranks", "environment", "threads", "slices"),
    [
        (EIGHT, None, 1, {}, 8, (EIGHT,)),
        (EIGHT, None, 2, {}, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (EIGHT, None, 3, {}, 2, ((0, 1), (2, 3, 4), (5, 6, 7))),
        (EIGHT, None, 8, {}, 1, tuple((cpu,) for cpu in EIGHT)),
        (EIGHT, None, 9, {}, 1, None),
        (EIGHT, 4.0, 2, {}, 2, None),
        (EIGHT, 2.5, 2, {}, 1, None),
        (EIGHT, 0.5, 2, {}, 1, None),
        (EIGHT, 8.0, 2, {}, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (EIGHT, 64.0, 2, {}, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ((1, 5, 3, 7), None, 2, {}, 2, ((1, 5), (3, 7))),
        ((3,), None, 1, {}, 1, ((3,),)),
        (EIGHT, None, 2, {"OMP_NUM_THREADS": "3"}, None, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (EIGHT, None, 2, {"OMP_NUM_THREADS": ""}, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        (EIGHT, None, 2, {"OMP_PLACES": "cores"}, 4, None),
        (EIGHT, None, 2, {"GOMP_CPU_AFFINITY": "0-7"}, 4, None),
    ],
)
def test_threads_and_slices(cpus, quota, ranks, environment, threads, slices):
    given = allot_cpus(Facts(cpus, quota), ranks, environment)
    assert (given.threads, given.slices) == (threads, slices)
    assert given.crowded == (ranks > len(cpus))


def test_slices_share_no_cpu_and_use_all_of_them():
    for count in range(1, 20):
        for ranks in range(1, count + 1):
            slices = allot_cpus(Facts(tuple(range(count))), ranks, {}).slices
            assert slices is not None
            assert [cpu for part in slices for cpu in part] == list(range(count))
            assert {len(part) for part in slices} <= {count // ranks, count // ranks + 1}


def test_no_binding_keeps_the_share_of_threads():
    given = allot_cpus(Facts(EIGHT), 2, {}, binding=False)
    assert (given.threads, given.slices) == (4, None)


def test_cpus_per_rank_is_followed_or_refused():
    given = allot_cpus(Facts(EIGHT), 2, {}, cpus_per_rank=2)
    assert (given.threads, given.slices) == (2, ((0, 1), (2, 3)))
    with pytest.raises(LaunchError, match="needs 10 CPUs, and 8 are"):
        allot_cpus(Facts(EIGHT), 2, {}, cpus_per_rank=5)
    assert allot_cpus(Facts(EIGHT), 2, {}, binding=False, cpus_per_rank=5).threads == 5


def test_the_summary_is_one_line_with_the_reason():
    assert allot_cpus(Facts(EIGHT, 4.0), 2, {}).summary == (
        "2 ranks on 8 CPUs, quota 4: OMP_NUM_THREADS=2, not bound (the quota is below the affinity set)"
    )
    assert "OMP_NUM_THREADS=3 as set by you, bound to CPUs 0-3 | 4-7" in (
        allot_cpus(Facts(EIGHT), 2, {"OMP_NUM_THREADS": "3"}).summary
    )


def tree(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return root


MOUNT_V2 = "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"
MOUNT_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct\n"


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "proc/self/mountinfo": MOUNT_V2,
                "sys/fs/cgroup/job/step/cpu.max": "max 100000\n",
            },
            None,
        ),
        (
            {
                "proc/self/cgroup": "0::/job/step\n",
                "proc/self/mountinfo": MOUNT_V2,
                "sys/fs/cgroup/job/step/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
            },
            1.5,
        ),
        (  # a container's view: its own cgroup is the root of the mount
            {
                "proc/self/cgroup": "0::/docker/abc\n",
                "proc/self/mountinfo": MOUNT_V2.replace(" / ", " /docker/abc ", 1),
                "sys/fs/cgroup/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/batch\n1:name=systemd:/x\n0::/\n",
                "proc/self/mountinfo": MOUNT_V1,
                "sys/fs/cgroup/cpu/batch/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/batch/cpu.cfs_period_us": "100000\n",
            },
            0.5,
        ),
        (
            {
                "proc/self/cgroup": "4:cpu:/batch\n",
                "proc/self/mountinfo": MOUNT_V1,
                "sys/fs/cgroup/cpu/batch/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/batch/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        (  # both versions mounted: the tighter one counts
            {
                "proc/self/cgroup": "4:cpu:/a\n0::/b\n",
                "proc/self/mountinfo": MOUNT_V1 + MOUNT_V2.replace("/sys/fs/cgroup ", "/sys/fs/cgroup/unified "),
                "sys/fs/cgroup/cpu/a/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/a/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/unified/b/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
        (
            {
                "proc/self/cgroup": "0::/a b\n",
                "proc/self/mountinfo": MOUNT_V2.replace("/sys/fs/cgroup", "/mnt/c\\040g"),
                "mnt/c g/a b/cpu.max": "100000 50000\n",
            },
            2.0,
        ),
        *(
            (  # any bytes in a name, and a file system without a source
                {
                    "proc/self/cgroup": b"13:odd\n0::/" + name + b"\n",
                    "proc/self/mountinfo": b"66 44 0:40 / /mnt rw - tmpfs  rw\n\n44 1 0:1 / /" + name + b" rw - ext4 "
                    b"/dev/" + name + b" rw\n" + MOUNT_V2.encode(),
                    os.fsdecode(b"sys/fs/cgroup/" + name + b"/cpu.max"): "200000 100000\n",
                },
                2.0,
            )
            for name in (b"Schl\xfcssel", "ü\x0b\x85\u2028\x1c".encode(), b"a:b - c")
        ),
    ],
)
def test_quota_of_both_cgroup_versions(tmp_path, files, quota):
    assert machine.cpu_quota(tree(tmp_path, files)) == quota


def test_hardware_threads_of_a_core_are_neighbours(tmp_path):
    files = {}
    for cpu in range(8):  # the usual numbering: 0-3 first threads, 4-7 second threads; two packages
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{base}/core_id"] = str(cpu % 2)
        files[f"{base}/physical_package_id"] = str(cpu % 4 // 2)
    order = machine.by_core(set(range(8)), tree(tmp_path, files))
    assert order == (0, 4, 1, 5, 2, 6, 3, 7)
    assert machine.by_core({5, 2, 9}, tmp_path / "none") == (2, 5, 9)
