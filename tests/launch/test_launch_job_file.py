"""`enginerun job riseml.yml`: the meaning of a job description, its invalid forms, and how its lines run."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from engine.launch.cli import main
from engine.launch.errors import LaunchError
from engine.launch.jobfile import command
from engine.launch.jobfile.riseml import Description, command_of, describe
from engine.launch.process.devices import devices_here

from .launch_jobs import Launcher

pytestmark = [
    pytest.mark.quick,
    pytest.mark.skipif(find_spec("yaml") is None, reason="needs PyYAML"),
]

WHOLE = """\
project: example
train:
  framework: tensorflow
  tensorflow:
    version: 1.5.0
    horovod:
      workers: 32
  resources:
    gpus: 4
    cpus: 12
    mem: 4096
  run:
  - python prepare.py --out 'a b'
  - python train.py
"""
SMALL = """\
train:
  framework: pytorch
  pytorch:
    horovod:
      workers: {workers}
  resources:
    {resources}
  run: python train.py
"""


def wrote(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "riseml.yml"
    path.write_text(text)
    return path


def small(tmp_path: Path, workers: str = "2", resources: str = "{cpus: 1}") -> Description:
    return describe(wrote(tmp_path, SMALL.format(workers=workers, resources=resources)))


def test_a_description_as_it_was_documented(tmp_path):
    told = describe(wrote(tmp_path, WHOLE))
    assert (told.project, told.framework, told.distributed) == ("example", "tensorflow", True)
    assert (told.workers, told.processes, told.size) == (32, 4, 128)  # one for each GPU
    assert told.version.value == "1.5.0" and (told.gpus.value, told.cpus.value, told.mem.value) == (4, 12, 4096)
    assert told.cpus.place.endswith("riseml.yml:10: train.resources.cpus")
    assert told.run == ("python prepare.py --out 'a b'", "python train.py")


@pytest.mark.parametrize(
    ("workers", "resources", "processes"),
    [
        ("2", "{cpus: 4}", 1),
        ("2", "{gpus: 0}", 1),
        ("2", "{gpus: 3}", 3),
        ("{count: 2}", "{gpus: 3}", 3),
        ("{count: 2, processes: 1}", "{gpus: 4}", 1),
        ("{count: 2, processes: 5}", "{gpus: 0}", 5),
    ],
)
def test_processes_of_a_worker(tmp_path, workers, resources, processes):
    told = small(tmp_path, workers, resources)
    assert (told.workers, told.processes) == (2, processes)


def test_without_a_section_horovod_one_process_runs(tmp_path):
    told = describe(wrote(tmp_path, "train: {framework: keras, resources: {gpus: 4}, run: [python train.py]}"))
    assert (told.distributed, told.size, told.version) == (False, 1, None)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "riseml.yml: it is a section, with keys below it; allowed at the top: project, train"),
        ("- a", "riseml.yml:1: it is a section, with keys below it"),
        ("a: [", "riseml.yml:1: no YAML: "),
        ("project: x", "riseml.yml:1: train: it is missing; allowed at the top: project, train"),
        ("deploy: x", "riseml.yml:1: deploy: not known; allowed at the top: project, train"),
        ("project: x\nproject: y", "riseml.yml:2: project: it stands here twice"),
        ("train: {run: [x]}", "riseml.yml:1: train.framework: it is missing; allowed in train: framework, resources"),
        ("train: {framework: keras}", "train.run: it is missing"),
        ("train: {framework: caffe, run: x}", "train.framework: 'caffe' is not one of keras, mxnet, pytorch, tensorfl"),
        ("train: {framework: keras, run: []}", "train.run: the list is empty"),
        ("train: {framework: keras, run: [{a: b}]}", "train.run: it takes a list of command lines"),
        ("train: {framework: keras, run: [null]}", "train.run: it takes a list of command lines"),
        ("train: {framework: keras, run: x, image: y}", "train.image: not known; allowed in train: framework, "),
        (
            WHOLE.replace("cpus", "cpu"),
            "riseml.yml:10: train.resources.cpu: not known; allowed in train.resources: cpus",
        ),
        (
            WHOLE.replace("12", "many"),
            "riseml.yml:10: train.resources.cpus: 'many' is not a whole number from 1 to 1048576",
        ),
        (WHOLE.replace("4096", ""), "riseml.yml:11: train.resources.mem: it takes a whole number from 1 to"),
        (
            WHOLE.replace("32", "0"),
            "riseml.yml:7: train.tensorflow.horovod.workers: '0' is not a whole number from 1",
        ),
        (WHOLE.replace("32", "[1]"), "riseml.yml:7: train.tensorflow.horovod.workers: it takes a whole number"),
        (WHOLE.replace("32", "{processes: 1}"), "riseml.yml:7: train.tensorflow.horovod.workers.count: it is missing"),
        (WHOLE.replace("workers:", "worker:"), "riseml.yml:7: train.tensorflow.horovod.worker: not known; allowed in "),
        (WHOLE.replace("  tensorflow:", "  keras:"), "riseml.yml:4: train.keras: the framework is tensorflow: rename"),
    ],
)
def test_what_cannot_be_is_refused_with_its_line_and_key(tmp_path, text, error):
    with pytest.raises(LaunchError) as caught:
        describe(wrote(tmp_path, text))
    assert error in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_and_a_missing_pyyaml(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["job"]) == 2
    assert "cannot read 'riseml.yml': No such file or directory; write 'enginerun job FILE'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    Path("other.yml").touch()
    assert main(["job", "other.yml"]) == 2
    assert "'other.yml' is YAML, which needs PyYAML: 'pip install pyyaml'" in capsys.readouterr().err


BUILTINS = ("cd /tmp", "export A", "umask 022", "ulimit -n 64", "exit 3", "exec python train.py", ":", "set -e")


def test_a_shell_runs_what_has_something_for_a_shell():
    assert command_of("python train.py --out 'a b'") == ("python", "train.py", "--out", "a b")
    for line in (
        "A=1 python train.py",
        "python train.py > log",
        "cd x && python train.py",
        "echo $ENGINE_RANK",
        *BUILTINS,
    ):
        assert command_of(line) == ("sh", "-c", line)
    with pytest.raises(LaunchError, match="No closing quotation"):
        command_of("python 'train.py")


GPUS = tuple(map(str, range(8)))


@pytest.mark.parametrize(
    ("workers", "resources", "devices"),
    [
        ("2", "{cpus: 1}", ()),
        ("2", "{gpus: 0}", ("", "")),
        ("2", "{gpus: 2}", ("0,1,2,3",) * 4),  # each chooses by local_rank
        ("{count: 2, processes: 1}", "{gpus: 4}", ("0,1,2,3", "4,5,6,7")),
        ("{count: 2, processes: 2}", "{gpus: 4}", ("0,1", "2,3", "4,5", "6,7")),
        ("{count: 2, processes: 2}", "{gpus: 3}", ("0,1,2", "0,1,2", "3,4,5", "3,4,5")),
    ],
)
def test_which_gpus_a_process_sees(tmp_path, workers, resources, devices):
    assert command.devices_of(small(tmp_path, workers, resources), GPUS) == devices


def test_cpus_and_memory_are_divided_among_the_processes_of_a_worker(tmp_path):
    bounds = command.bounds_of(small(tmp_path, "{count: 2, processes: 2}", "{cpus: 5, mem: 1000}"))
    assert (bounds.cpus, bounds.memory) == (2, 500 << 20)
    with pytest.raises(LaunchError, match=r"gpus: 2 workers need 8 GPUs, and this machine has 0: write 'gpus: 0'"):
        command.devices_of(small(tmp_path, "2", "{gpus: 4}"), ())


def test_fewer_cpus_than_processes_are_refused_unless_nothing_is_bound(tmp_path, capsys):
    path = wrote(tmp_path, SMALL.format(workers="{count: 1, processes: 2}", resources="{cpus: 1}"))
    assert main(["job", str(path), "--check"]) == 2
    said = capsys.readouterr().err
    assert "riseml.yml:7: train.resources.cpus: a worker has 2 processes, and at least one CPU for each" in said
    assert "add --no-binding" in said
    assert main(["job", str(path), "--check", "--no-binding"]) == 0


def test_the_gpus_of_this_machine(tmp_path):
    for name in ("nvidia10", "nvidia2", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert devices_here(None, tmp_path) == ("2", "10")
    assert devices_here("3, GPU-ab", tmp_path) == ("3", "GPU-ab")
    assert devices_here("", tmp_path) == ()


def test_a_version_is_compared_and_nothing_installed(tmp_path, monkeypatch):
    told = describe(wrote(tmp_path, WHOLE.replace("gpus: 4", "gpus: 0")))
    bounds = command.bounds_of(told)

    def said(found: tuple[str, str] | None) -> list[str]:
        monkeypatch.setattr(command, "find_distribution", lambda package: found)
        return command.describe_job(Path("riseml.yml"), told, bounds)

    assert (
        "riseml.yml:5: train.tensorflow.version: tensorflow 1.5.0 is asked for; what runs is what is installed, "
        in ("\n".join(said(("tensorflow-cpu", "2.21.0"))))
    )
    assert said(None)[1] == "tensorflow is not installed here, and nothing is installed by this"
    for same in ("1.5.0", "1.5.0+cpu", "1.5.0.post1"):
        assert "asked for" not in "".join(said(("tensorflow", same)))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["-np", "3"], "-np 3 is not what the file says, 2: leave -np out"),
        (["python", "other.py"], "the file says what runs: leave 'python other.py' out"),
        (["-H", "localhost:1"], "needs more slots than the 1 of the hosts"),
        (["--no-such"], "unrecognized arguments: --no-such"),
    ],
)
def test_options_that_contradict_the_file(tmp_path, options, error, capsys):
    path = wrote(tmp_path, SMALL.format(workers="2", resources="{mem: 1000}"))
    assert main(["job", str(path), "--check", *options]) == 2
    assert error in capsys.readouterr().err


def test_more_cpus_than_there_are(tmp_path, capsys):
    path = wrote(tmp_path, SMALL.format(workers="2", resources="{cpus: 10000}"))
    assert main(["job", str(path), "--check"]) == 2
    assert "riseml.yml:7: train.resources.cpus: 2 workers need 20000 CPUs, and " in capsys.readouterr().err
    assert main(["job", str(path), "--check", "--no-binding"]) == 0


def test_check_shows_what_would_be_started_and_starts_nothing(tmp_path, capsys):
    text = WHOLE.replace("32", "2").replace("gpus: 4", "gpus: 0").replace("cpus: 12", "cpus: 1")
    path = wrote(tmp_path, text.replace("python train.py", f"touch {tmp_path}/started"))
    assert main(["job", str(path), "--check", "--verbose", "--no-binding"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].endswith("2 workers with 1 process each; no hosts are given: this machine runs them all")
    assert "each process has 1 CPU, 4 GiB of private memory, CUDA_VISIBLE_DEVICES=''" in shown
    options = "-np 2 --horovod --cpus-per-rank 1 --verbose --no-binding"
    assert shown[-2:] == [
        f"line 1 of 2: enginerun {options} -- python prepare.py --out 'a b'",
        f"line 2 of 2: enginerun {options} -- touch {tmp_path}/started",
    ]
    assert not (tmp_path / "started").exists()


def test_lines_run_one_after_another_within_their_bounds(launcher: Launcher):
    (launcher.home / "first.py").write_text(
        "import os, pathlib, resource\n"
        "rank = os.environ['ENGINE_RANK']\n"
        "print(os.environ['CUDA_VISIBLE_DEVICES'] == '', resource.getrlimit(resource.RLIMIT_DATA)[0] >> 20)\n"
        "pathlib.Path(f'done.{rank}').touch()\n"
    )
    (launcher.home / "second.py").write_text(
        "import os, pathlib\n"
        "print(sorted(path.name for path in pathlib.Path('.').glob('done.*')), 'HOROVOD_RANK' in os.environ)\n"
    )
    lines = "\n".join(f"  - {sys.executable} {name}.py" for name in ("first", "second"))
    text = SMALL.format(workers="{count: 1, processes: 3}", resources="{gpus: 0, mem: 1536}")
    wrote(launcher.home, text.replace("  run: python train.py", f"  run:\n{lines}"))
    done = launcher.run("job", "--no-binding", "--output-dir", "out")
    assert done.code == 0, done.err
    for rank in range(3):
        assert done.lines(rank) == ["True 512", "['done.0', 'done.1', 'done.2'] True"]
        assert (launcher.home / f"out/line.1/rank.{rank}/stdout").read_text() == "True 512\n"
    assert "enginerun: line 1 of 2: " in done.err and "enginerun: line 2 of 2: " in done.err


def test_a_line_that_fails_is_the_last(launcher: Launcher):
    lines = "\n".join(f"  - {line}" for line in ("exit $((3 * ENGINE_RANK))", "touch started"))
    wrote(launcher.home, SMALL.format(workers="2", resources="{}").replace("run: python train.py", f"run:\n{lines}"))
    done = launcher.run("job", "riseml.yml")
    assert done.code == 3
    assert "line 1 of 2 has failed: what follows it is not started" in done.err
    assert not (launcher.home / "started").exists()


def test_an_interrupt_ends_all_lines(launcher: Launcher):
    lines = "\n".join(f"  - {line}" for line in ("touch here.$ENGINE_RANK; exec sleep 600", "touch started"))
    wrote(launcher.home, SMALL.format(workers="2", resources="{}").replace("run: python train.py", f"run:\n{lines}"))
    job = launcher.start("job")
    launcher.wait_for("here.0", "here.1")
    job.send_signal(signal.SIGINT)
    assert launcher.finish(job).code == 130
    assert not (launcher.home / "started").exists()


WORKERS = """
import os, pathlib
names = "ENGINE_RANK ENGINE_LOCAL_RANK ENGINE_CROSS_RANK STAND_IN CUDA_VISIBLE_DEVICES".split()
print(*[os.environ.get(name) for name in names])
pathlib.Path(f"done.{os.environ['ENGINE_RANK']}").touch()
"""


def test_workers_run_on_several_hosts_and_wait_for_all_after_each_line(launcher: Launcher):
    (launcher.home / "first.py").write_text(WORKERS)
    lines = "\n".join(f"  - {line}" for line in (f"{sys.executable} first.py", "echo done.*"))
    text = SMALL.format(workers="{count: 3, processes: 2}", resources="{gpus: 2, cpus: 2}")
    wrote(launcher.home, text.replace("  run: python train.py", f"  run:\n{lines}"))
    launcher.environment["CUDA_VISIBLE_DEVICES"] = "4,5,7,8"
    hosts = ["-H", "a:4,b:2,c:2", "--launch-agent", "env STAND_IN={host}", "--no-binding"]
    check = launcher.run("job", "--check", *hosts)
    assert check.code == 0, check.err
    assert check.out.splitlines()[1:3] == ["a: workers 0, 1 (ranks 0-3)", "b: worker 2 (ranks 4, 5)"]
    assert check.out.splitlines()[3] == "no rank runs on c: the other hosts have slots for all 6 ranks"
    assert "this machine runs them all" not in check.out
    done = launcher.run("job", "--output-dir", "out", *hosts)
    assert done.code == 0, done.err
    first = [done.lines(rank)[0] for rank in range(6)]
    assert first == [f"{rank} {rank % 4} {rank // 4} {'a 4,5,7,8' if rank < 4 else 'b 4,5'}" for rank in range(6)]
    assert [done.lines(rank)[1] for rank in range(6)] == [" ".join(f"done.{rank}" for rank in range(6))] * 6
    assert (launcher.home / "out/line.2/rank.5/stdout").exists()
    assert "enginerun: b: worker 2 (ranks 4, 5)" in done.err and done.err.count("no rank runs on c") == 1
    split = launcher.run("job", "-H", "a:3,b:3", *hosts[2:])
    assert split.code == 2
    assert (
        "--hosts: worker 1 has 2 processes (ranks 2, 3), and 'a' would run some of them: give each host a" in split.err
    )
    launcher.environment["CUDA_VISIBLE_DEVICES"] = "4,5"
    few = launcher.run("job", *hosts)
    assert few.code == 2 and "a: 2 workers need 4 GPUs, and this machine has 2: write 'gpus: 0'" in few.err


HOSTILE = {
    "alias in a key": "? [&a [x, x, x, x, x, x, x, x], &b [*a, *a, *a, *a, *a, *a, *a], [*b, *b, *b, *b, *b]]\n: 1\n",
    "alias": "a: &a 1\nb: *a\n",
    "alias of itself": "&a [*a]\n",
    "merged": "a: &a {x: 1}\nb:\n  <<: *a\n",
    "deep flow": "[" * 60_000,
    "deep flow of maps": "{a: " * 15_000,
    "deep block": "- " * 30_000,
    "deep explicit keys": "? " * 30_000,
    "a section as a key": "? {a: {b: c}}\n: 1\n",
    "a list as a key": "train: {[1, 2]: 3}\n",
    "many keys": "".join(f"k{number}: 1\n" for number in range(6_000)),
    "a long key": f"? {'k' * 60_000}\n: 1\n",
    "large": "#" * 70_000,
    "no number": "!!int ''\n",
    "no date": "2001-99-99\n",
    "a number of many digits": "1" * 60_000,
    "a tag of Python": "!!python/object/apply:os.system ['touch pwned']\n",
    "a byte that is no text": "\udcff",
    "two documents": "---\na: 1\n---\nb: 2\n",
    "a control character": "a: \x1b[2K\n",
}


@pytest.mark.parametrize("how", HOSTILE)
@pytest.mark.parametrize("command", [["job"], ["-np", "1", "--config-file"]])
def test_a_hostile_file_is_refused_in_one_line_and_soon(tmp_path, monkeypatch, capsys, command, how):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "hostile.yaml"
    path.write_bytes(HOSTILE[how].encode(errors="surrogateescape"))
    started = time.process_time()
    assert main([*command, str(path), *(["true"] if command != ["job"] else [])]) == 2
    assert time.process_time() - started < 5
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and len(said) < 600 and said[:-1].isprintable()
    assert sorted(tmp_path.iterdir()) == [path]


def test_a_file_that_never_ends_or_comes_is_refused(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", Path("/dev/zero")):
        with pytest.raises(LaunchError, match="cannot read"):
            describe(path)


@pytest.mark.parametrize(
    "line",
    [
        *("echo \x1b[2K\x1b[1Grm x", "echo 'a\rb'", "echo \u202etxt.exe", "echo \x9b1A \x07"),
        "cd x\npython 'it''s' \\\ttrain.py",
    ],
)
def test_what_is_shown_of_a_file_is_what_runs_and_does_not_control_a_terminal(tmp_path, capsys, line):
    text = "".join(each if each.isprintable() and each not in '\\"' else f"\\U{ord(each):08x}" for each in line)
    path = wrote(tmp_path, f'project: "p\\e[2K"\ntrain:\n  framework: pytorch\n  run: "{text}"\n')
    assert main(["job", str(path), "--check"]) == 0
    shown = capsys.readouterr().out
    assert all(each.isprintable() for each in shown.replace("\n", ""))
    [command] = [each.partition(" -- ")[2] for each in shown.splitlines() if each.startswith("line 1 of 1: ")]
    arguments = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {command}"], env={"LC_ALL": "C.UTF-8"}, capture_output=True, check=True
    ).stdout.decode()
    assert tuple(arguments.split("\0")[:-1]) == command_of(line)
