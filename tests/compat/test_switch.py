"""The compatibility switch: scripts written for Horovod run unchanged, however they are started."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import engine

from ..left_out import NAMES, leaving_out

HERE = Path(__file__).parent
ROOT = str(Path(engine.__file__).parents[1])
PROBE = "import horovod, sys; print(horovod.__version__, horovod.run.__module__, *sys.argv[1:])"
FOUND = "0.28.1 engine.runner.function"
LAUNCHER = (sys.executable, "-P", "-m", "engine.launch", "--quiet")
SETTINGS = ("ENGINE_", "HOROVOD_", "OMP_", "PYTHON")


def start(
    *command: object, cwd: Path, path: tuple[object, ...] = (), code: int = 0, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, with `path` and the engine on PYTHONPATH."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(SETTINGS)}
    env |= variables
    env["PYTHONPATH"] = os.pathsep.join(map(str, (*path, ROOT)))
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def plain_lines(text: str) -> list[str]:
    """Return the lines without the prefix of their rank."""
    return [line.partition(">:")[2] if line.startswith("[") else line for line in text.splitlines()]


def in_one_process(saved: dict[str, object], world: int) -> dict[str, object]:
    """Train from the same start with the batches of all ranks, without communication."""
    import torch
    from torch import nn

    x = torch.linspace(-1, 1, 256).reshape(64, 4)
    y = x.sin().sum(dim=1, keepdim=True)
    model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
    model.load_state_dict(saved["start"])  # type: ignore[arg-type]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02 * world, momentum=0.9)
    for _ in range(2):
        for inputs, targets in zip(x.split(8 * world), y.split(8 * world), strict=True):
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs), targets).backward()
            optimizer.step()
    return model.state_dict()


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "command",
    [
        ("-np", "2", "--horovod", sys.executable),
        ("-np", "2", sys.executable, "-m", "engine.compat"),
    ],
    ids=["option", "module"],
)
def test_a_training_script_runs_unchanged_and_trains_as_one_process_would(tmp_path, command):
    torch = pytest.importorskip("torch", reason="needs torch")
    done = start(*LAUNCHER, *command, HERE / "horovod_script.py", "--epochs", 2, cwd=tmp_path)
    first, second = (torch.load(tmp_path / f"model.{rank}.pt") for rank in range(2))
    expected = in_one_process(first, world=2)
    for name, tensor in first["end"].items():
        assert torch.equal(tensor, second["end"][name]), name
        assert torch.allclose(tensor, expected[name], atol=1e-5), name
        assert not torch.equal(tensor, first["start"][name]), name
    assert (first["steps"], second["steps"]) == (8, 8)
    assert f"[0]<stdout>:epoch 1: loss {first['loss']:.6f}\n" in done.stdout
    assert first["loss"] == second["loss"]


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Make a directory with one probe as script, module, shell script, console script and child process."""
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "probe.py").write_text(PROBE)
    (tmp_path / "start.sh").write_text(f'exec "{sys.executable}" probe.py "$@"\n')
    console = tmp_path / "console"
    console.write_text(f"#!{sys.executable}\n{PROBE}\n")
    console.chmod(0o755)
    (tmp_path / "spawn.py").write_text(
        "import multiprocessing, sys\n"
        "def probe(*rest):\n"
        f"    sys.argv[1:] = rest; exec({PROBE!r})\n"
        "if __name__ == '__main__':\n"
        "    child = multiprocessing.get_context('spawn').Process(target=probe, args=sys.argv[1:])\n"
        "    child.start(); child.join(); sys.exit(child.exitcode)\n"
    )
    return tmp_path


WAYS = {
    "script": (sys.executable, "probe.py"),
    "flags": (sys.executable, "-u", "-W", "ignore", "-P", "probe.py"),
    "module": (sys.executable, "-m", "package.probe"),
    "code": (sys.executable, "-c", PROBE),
    "shell": ("bash", "start.sh"),
    "console script": ("./console",),
    "spawned child": (sys.executable, "spawn.py"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("way", WAYS)
def test_the_option_reaches_every_python(programs, way):
    done = start(*LAUNCHER, "-np", 1, "--horovod", "--", *WAYS[way], "a", "-np", cwd=programs)
    assert plain_lines(done.stdout) == [f"{FOUND} a -np"]
    assert done.stderr == ""


@pytest.mark.parametrize("way", WAYS)
def test_without_it_horovod_is_what_is_installed_or_nothing(programs, way):
    done = start(*WAYS[way], cwd=programs, code=1)
    assert "No module named 'horovod'" in done.stderr


@pytest.mark.parametrize(
    "command", [("probe.py",), ("-m", "package.probe"), ("spawn.py",)], ids=["script", "module", "spawned child"]
)
def test_the_module_runs_scripts_and_modules(programs, command):
    done = start(sys.executable, "-m", "engine.compat", *command, "a", "-m", cwd=programs)
    assert done.stdout.splitlines() == [f"{FOUND} a -m"]


def test_a_script_finds_what_lies_beside_it_and_is_main(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "beside.py").write_text("value = 5")
    (tmp_path / "scripts" / "train.py").write_text(
        "import beside, pickle\n"
        "class Own: pass\n"
        "assert type(pickle.loads(pickle.dumps(Own()))) is Own\n"
        "print(beside.value, __name__, __file__)"
    )
    done = start(sys.executable, "-m", "engine.compat", "scripts/train.py", cwd=tmp_path)
    assert done.stdout.split() == ["5", "__main__", str(tmp_path / "scripts" / "train.py")]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        ((), 2, "usage: python -m engine.compat"),
        (("-m",), 2, "usage: python -m engine.compat"),
        (("--help",), 0, "usage: python -m engine.compat"),
        (("absent.py",), 2, "there is no file 'absent.py' in "),
        (("-m", "absent"), 1, "No module named absent"),
    ],
)
def test_what_cannot_run_is_told(tmp_path, arguments, code, said):
    done = start(sys.executable, "-m", "engine.compat", *arguments, cwd=tmp_path, code=code)
    assert said in done.stdout + done.stderr


def test_an_exit_code_is_passed_on(tmp_path):
    (tmp_path / "ends.py").write_text("import sys; sys.exit(7)")
    start(sys.executable, "-m", "engine.compat", "ends.py", cwd=tmp_path, code=7)


def test_an_installed_horovod_is_passed_over_and_one_rank_says_so(programs):
    installed = programs / "installed"
    (installed / "horovod").mkdir(parents=True)
    (installed / "horovod" / "__init__.py").write_text("__version__ = 'theirs'; run = print")
    theirs = start(*LAUNCHER, "-np", 1, sys.executable, "probe.py", cwd=programs, path=(installed,))
    assert plain_lines(theirs.stdout) == ["theirs builtins"]
    done = start(*LAUNCHER, "-np", 2, "--horovod", sys.executable, "probe.py", cwd=programs, path=(installed,))
    assert plain_lines(done.stdout) == [FOUND, FOUND]
    said = [line for line in done.stderr.splitlines() if str(installed) in line]
    assert len(said) == 1 and said[0].startswith("[0]<stderr>:")
    assert "horovod is this engine, not" in said[0]


def test_the_users_sitecustomize_still_runs(programs):
    own = programs / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os, sys; sys.own = os.getpid()")
    program = "import os, sys, horovod, sitecustomize; print(sys.own == os.getpid(), sitecustomize.__file__, sys.path)"
    done = start(*LAUNCHER, "-np", 1, "--horovod", sys.executable, "-c", program, cwd=programs, path=(own,))
    (line,) = plain_lines(done.stdout)
    assert line.startswith(f"True {own}/sitecustomize.py ")
    assert "startup" not in line


def test_a_program_that_does_not_ask_for_horovod_loads_no_more_than_the_writer_of_its_report(tmp_path):
    program = "import sys; print([name for name in sys.modules if name.partition('.')[0] == 'engine'])"
    done = start(*LAUNCHER, "-np", 1, "--horovod", sys.executable, "-c", program, cwd=tmp_path)
    assert plain_lines(done.stdout) == ["['engine.exit_report.writer']"]


def test_a_python_without_enginerun_is_told(tmp_path):
    program = "import sys; sys.modules['enginerun'] = None; import horovod"
    done = start(*LAUNCHER, "-np", 1, "--horovod", sys.executable, "-c", program, cwd=tmp_path, code=1)
    assert f"stands in for it under --horovod, and {sys.executable} has none" in done.stderr


def test_a_script_that_starts_its_own_ranks(tmp_path):
    pytest.importorskip("cloudpickle", reason="needs cloudpickle")
    (tmp_path / "train.py").write_text(
        "from horovod import run\n"
        "def train(first, second=0):\n"
        "    import horovod, os\n"
        "    return horovod.__version__, os.environ['ENGINE_RANK'], first, second\n"
        "print(run(train, args=(3,), kwargs={'second': 4}, num_proc=2, hosts='localhost:2', use_gloo=True))\n"
    )
    done = start(sys.executable, "-m", "engine.compat", "train.py", cwd=tmp_path)
    assert done.stdout == "[('0.28.1', '0', 3, 4), ('0.28.1', '1', 3, 4)]\n"
    assert done.stderr == "enginerun: without effect: --gloo (shared memory on one host, TCP between hosts)\n"


def test_a_function_of_a_module_that_imports_horovod_runs_on_ranks(tmp_path):
    """The function is pickled by name, so each rank imports the module."""
    (tmp_path / "work.py").write_text("import horovod\ndef train(): return horovod.__version__\n")
    (tmp_path / "train.py").write_text("import work, horovod; print(horovod.run(work.train, num_proc=2))")
    done = start(sys.executable, "-m", "engine.compat", "train.py", cwd=tmp_path)
    assert done.stdout == "['0.28.1', '0.28.1']\n"


MAIN_SCRIPT = """
import argparse
import horovod
import horovod.torch as hvd
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--num-proc", type=int)


class Net(torch.nn.Linear):
    pass


def main(args):
    hvd.init()
    model = Net(2, 1)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())
    model(torch.ones(1, 2) * hvd.rank()).sum().backward()
    optimizer.step()
    return args.num_proc, hvd.size(), hvd.allreduce(model.weight.detach(), op=hvd.Sum).sum().item() / hvd.size()


if __name__ == "__main__":
    args = parser.parse_args()
    first, second = horovod.run(main, args=(args,), num_proc=args.num_proc, use_gloo=True)
    print(first == second, *first[:2])
"""


@pytest.mark.slow
@pytest.mark.parametrize("manual", [False, True], ids=["module", "install"])
def test_a_main_script_that_imports_horovod_at_its_top_starts_its_own_ranks(tmp_path, manual):
    """The switch is inherited by the ranks, or is one of this process only."""
    pytest.importorskip("cloudpickle", reason="needs cloudpickle")
    pytest.importorskip("torch", reason="needs torch")
    switch = "from engine.compat import install\ninstall()\n" if manual else ""
    (tmp_path / "train.py").write_text(switch + MAIN_SCRIPT)
    command = (sys.executable, *(() if manual else ("-m", "engine.compat")), "train.py", "--num-proc", 2)
    assert start(*command, cwd=tmp_path).stdout == "True 2 2\n"


def test_the_command_of_job_scripts_is_the_launcher_with_the_switch(programs):
    command = (sys.executable, "-P", "-m", "engine.launch.cli.horovodrun")
    options = ("-np", 1, "--gloo", "--start-timeout", 30, "--quiet")
    done = start(*command, *options, sys.executable, "probe.py", "a", cwd=programs)
    assert plain_lines(done.stdout) == [f"{FOUND} a"]
    assert done.stderr == "enginerun: without effect: --gloo (shared memory on one host, TCP between hosts)\n"
    done = start(*command, "-np", 0, "true", cwd=programs, code=2)
    assert done.stderr.startswith("enginerun: error: argument -np")


def test_the_command_leaves_an_installed_horovod_its_own(programs):
    installed = programs / "installed"
    (installed / "horovod-0.28.1.dist-info").mkdir(parents=True)
    (installed / "horovod-0.28.1.dist-info" / "METADATA").write_text("Name: horovod\nVersion: 0.28.1\n")
    entry = "[console_scripts]\nhorovodrun = their_launcher:run_commandline\n"
    (installed / "horovod-0.28.1.dist-info" / "entry_points.txt").write_text(entry)
    (installed / "their_launcher.py").write_text("import sys\ndef run_commandline(): print('theirs', *sys.argv[1:])\n")
    command = (sys.executable, "-P", "-m", "engine.launch.cli.horovodrun")
    done = start(*command, "-np", 2, "python", "probe.py", cwd=programs, path=(installed,))
    assert done.stdout == "theirs -np 2 python probe.py\n"


MODULES = """
import importlib, importlib.util, sys
import horovod, horovod.torch as hvd
import engine, engine.data, engine.torch

assert hvd.allreduce is engine.torch.allreduce and hvd.Sum is engine.Sum
assert hvd is sys.modules["horovod.torch"] and hvd is not engine.torch
assert hvd.mpi_ops.allreduce is engine.torch.allreduce  # Horovod's package has imported it
assert not hasattr(horovod, "spark") and not hasattr(hvd, "gradient")
for name in "mpi_ops compression optimizer functions sync_batch_norm".split():
    module = importlib.import_module(f"horovod.torch.{name}")
    assert module.DistributedOptimizer is engine.torch.DistributedOptimizer, name
from horovod.torch.mpi_ops import Average, allreduce_async_, local_rank, poll, synchronize
from horovod.torch.compression import Compression
from horovod.torch.functions import broadcast_object, broadcast_parameters
import horovod.common.process_sets
from horovod.common.exceptions import HorovodInternalError, HorovodVersionMismatchError, HostsUpdatedInterrupt
assert HorovodInternalError is engine.errors.CollectiveError
from horovod.common.basics import HorovodBasics
from horovod.common.util import check_extension, extension_available, gpu_available
import torch
assert extension_available("torch") and not extension_available("caffe") and not gpu_available("caffe")
assert gpu_available("torch") is torch.cuda.is_available()
check_extension("horovod.torch", "HOROVOD_WITH_PYTORCH", __file__, "mpi_lib_v2")
from horovod.runner import run
assert run is horovod.run is engine.run
from horovod.run import run as again
assert again is run and callable(horovod.run) and horovod.run.run is run
from horovod.data import AsyncDataLoaderMixin, BaseDataLoader
from horovod.data.data_loader_base import BaseDataLoader as again
assert again is BaseDataLoader is engine.data.BaseDataLoader
import copy, pickle
assert pickle.loads(pickle.dumps(hvd)) is hvd is copy.deepcopy(hvd)
from horovod.version import __version__
assert __version__ == horovod.__version__ == "0.28.1"
star = {}
exec("from horovod.torch import *", star)
assert set(engine.torch.__all__) < set(star)
assert {"allreduce", "DistributedOptimizer"} < set(dir(hvd))
assert importlib.util.find_spec("horovod.torch") is not None
assert engine.torch.optimizer.__name__ == "engine.torch.optimizer"  # nothing of ours was renamed

basics = HorovodBasics(__file__, "mpi_lib_v2")
basics.init()
from horovod.torch.mpi_ops import _basics
assert _basics._get_process_set_ids_and_ranks() == {0: [0]} and _basics.size() == 1
assert hvd.global_process_set.ranks == [0]
assert (basics.rank(), basics.size(), basics.is_initialized()) == (0, 1, True)
assert basics.nccl_built() == engine.nccl_built() and "mpi_built" in dir(basics)
basics.shutdown()
assert not engine.is_initialized()

def refused(action, kind, *words):
    try:
        action()
    except kind as error:
        assert all(word in str(error) for word in words), (words, error)
    else:
        raise AssertionError(words)

names = "tensorflow.data jax ray.other spark.lightning torch.elastic.other"
more = "runner.launch runner.elastic.driver runner.common.util version.other common.elastic torch.mpi_ops.other"
for name in f"{names} {more}".split():
    refused(lambda: importlib.import_module(f"horovod.{name}"), ImportError, "no module", "horovod-modules.md")
refused(lambda: importlib.import_module("horovod.torch.reducer"), ImportError, "'horovod.torch.reducer'")
refused(lambda: importlib.import_module("horovod.runner.launch"), ImportError, "use enginerun")
import horovod.torch.elastic, engine.torch.elastic
assert hvd.elastic.TorchState is horovod.torch.elastic.TorchState is engine.torch.elastic.TorchState
refused(lambda: hvd.allredcue, AttributeError, "'horovod.torch' has no 'allredcue'")
refused(lambda: basics.allreduce, AttributeError, "'allreduce'")
refused(lambda: check_extension("horovod.caffe"), ImportError, "horovod.caffe")
refused(lambda: horovod(), TypeError, "'horovod' is not callable")
print("done")
"""


def test_modules_and_names_that_scripts_import(tmp_path):
    pytest.importorskip("torch", reason="needs torch")
    (tmp_path / "modules.py").write_text(MODULES)
    assert start(sys.executable, "-m", "engine.compat", "modules.py", cwd=tmp_path).stdout == "done\n"


OTHER_MODULES = """
import sys
import horovod.tensorflow as hvd
import engine.keras, engine.tensorflow
assert "torch" not in sys.modules
assert hvd.allreduce is engine.tensorflow.allreduce
from horovod.tensorflow.mpi_ops import _basics, size_op
from horovod.tensorflow.compression import Compression
assert hvd.SyncBatchNormalization is engine.tensorflow.SyncBatchNormalization
import horovod.tensorflow.keras as first, horovod.keras as second
import horovod.tensorflow.keras.callbacks
from horovod.keras.callbacks import MetricAverageCallback
for keras in first, second:
    assert keras.DistributedOptimizer is engine.keras.DistributedOptimizer
    assert keras.callbacks.MetricAverageCallback is MetricAverageCallback
import horovod.tensorflow.elastic, horovod.keras.elastic, horovod.tensorflow.keras.elastic
assert hvd.elastic.TensorFlowKerasState is engine.tensorflow.elastic.TensorFlowKerasState
assert first.elastic.KerasState is second.elastic.KerasState is engine.keras.elastic.KerasState
print("done")
"""


@pytest.mark.slow
def test_modules_of_tensorflow_and_keras(tmp_path):
    pytest.importorskip("tensorflow", reason="needs TensorFlow")
    (tmp_path / "modules.py").write_text(OTHER_MODULES)
    path, variables = tuple(leaving_out(*NAMES).values()), {"KERAS_BACKEND": "tensorflow"}
    command = sys.executable, "-m", "engine.compat", "modules.py"
    assert start(*command, cwd=tmp_path, path=path, **variables).stdout == "done\n"


OLD_SPELLINGS = """
import keras, numpy as np
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
try:
    keras.optimizers.SGD(lr=0.5)
except (TypeError, ValueError):
    import horovod.keras
optimizer = keras.optimizers.SGD(lr=0.5, momentum=0.9)
assert float(optimizer.lr) == 0.5 == float(optimizer.learning_rate)
optimizer.lr = 0.25
assert float(optimizer.learning_rate) == 0.25
optimizer.lr.assign(0.125)
model.compile(optimizer, loss="mse", experimental_run_tf_function=False)
model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
assert len(optimizer.variables()) == len(optimizer.variables) == 4
assert optimizer.get_config()["learning_rate"] == 0.125 and "lr" not in optimizer.get_config()
for refused in (lambda: keras.optimizers.SGD(rate=0.5), lambda: model.compile(optimizer, unknown=1)):
    try:
        refused()
    except (TypeError, ValueError):
        continue
    raise AssertionError
print("done")
"""


@pytest.mark.slow
def test_spellings_of_keras_2_are_accepted_once_horovods_keras_is_imported(tmp_path):
    pytest.importorskip("keras", reason="needs Keras")
    pytest.importorskip("tensorflow", reason="needs TensorFlow")
    (tmp_path / "spellings.py").write_text(OLD_SPELLINGS)
    command = sys.executable, "-m", "engine.compat", "spellings.py"
    assert start(*command, cwd=tmp_path, KERAS_BACKEND="tensorflow").stdout == "done\n"


def test_the_executors_on_ray_are_ours(tmp_path):
    pytest.importorskip("ray", reason="needs ray: pip install 'ray[train]'")
    program = """
import horovod.ray
from horovod.ray import RayExecutor
from horovod.ray.runner import RayExecutor as again
import engine.ray
assert RayExecutor is again is engine.ray.RayExecutor
from horovod.ray import ElasticRayExecutor, ray_logger
from horovod.ray.elastic import ElasticRayExecutor as again
from horovod.ray.ray_logger import log
assert ElasticRayExecutor is again is engine.ray.ElasticRayExecutor
assert ray_logger.log is log is engine.ray.ray_logger.log
print("done")
"""
    (tmp_path / "modules.py").write_text(program)
    assert start(sys.executable, "-m", "engine.compat", "modules.py", cwd=tmp_path).stdout == "done\n"


def test_the_switch_comes_before_the_first_import(tmp_path):
    program = """
import sys, types
from engine.compat import install
sys.modules["horovod"] = types.ModuleType("horovod")
try:
    install()
except ImportError as error:
    print(error)
del sys.modules["horovod"]
assert install() is install()
import horovod
"""
    done = start(sys.executable, "-c", program, cwd=tmp_path)
    assert done.stdout == "horovod has been imported already: call engine.compat.install() before that\n"


@pytest.mark.parametrize("level", ["debug", "warning"])
def test_variables_that_set_nothing_are_told_to_who_wants_to_know(tmp_path, level):
    variables = {"HOROVOD_ELASTIC": "1", "HOROVOD_CACHE_CAPACITY": "9", "HOROVOD_LOG_LEVEL": level}
    done = start(sys.executable, "-c", "import engine; engine.init()", cwd=tmp_path, **variables)
    said = [line for line in done.stderr.splitlines() if "without effect" in line]
    assert [line.partition(": ")[2] for line in said] == (
        ["set, and without effect here: HOROVOD_CACHE_CAPACITY, HOROVOD_ELASTIC"] if level == "debug" else []
    )
