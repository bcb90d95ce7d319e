"""`docs/reference/horovod-*.md` against the code: every name exists, and what a page says of each name holds."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch")

import engine
import engine.torch as hvd
from engine.compat import exceptions, modules
from engine.config import config
from engine.launch.cli import horovod_options
from engine.launch.cli.options import parse
from engine.launch.errors import LaunchError

from ..documents import DOCS, read_list, read_section

# Names that the page promises and this revision lacks. Existing names must not be listed here.
PENDING: set[str] = set()

FUNCTIONS = (
    "init shutdown is_initialized size local_size cross_size rank local_rank cross_rank is_homogeneous start_timeline "
    "stop_timeline mpi_threads_supported mpi_enabled gloo_enabled mpi_built gloo_built nccl_built ddl_built ccl_built "
    "cuda_built rocm_built Average Sum Adasum Min Max Product Compression HorovodInternalError HostsUpdatedInterrupt "
    "HorovodVersionMismatchError ProcessSet global_process_set add_process_set remove_process_set allreduce allreduce_ "
    "allreduce_async allreduce_async_ grouped_allreduce grouped_allreduce_ grouped_allreduce_async "
    "grouped_allreduce_async_ sparse_allreduce_async allgather allgather_async grouped_allgather "
    "grouped_allgather_async broadcast broadcast_ broadcast_async broadcast_async_ alltoall alltoall_async "
    "reducescatter reducescatter_async grouped_reducescatter grouped_reducescatter_async join barrier poll synchronize "
    "broadcast_parameters broadcast_optimizer_state broadcast_object allgather_object DistributedOptimizer "
    "SyncBatchNorm elastic.run elastic.TorchState elastic.ElasticSampler run"
).split()
TENSORFLOW = [
    f"tensorflow.{name}"
    for name in (
        "allreduce grouped_allreduce allgather grouped_allgather broadcast alltoall reducescatter "
        "grouped_reducescatter broadcast_ broadcast_variables broadcast_global_variables BroadcastGlobalVariablesHook "
        "broadcast_object broadcast_object_fn allgather_object join barrier rank_op size_op local_rank_op "
        "local_size_op process_set_included_op DistributedOptimizer DistributedGradientTape "
        "PartialDistributedGradientTape SyncBatchNormalization elastic.run elastic.TensorFlowState "
        "elastic.TensorFlowKerasState"
    ).split()
]
CALLBACKS = (
    "BroadcastGlobalVariablesCallback MetricAverageCallback LearningRateScheduleCallback LearningRateWarmupCallback "
    "BestModelCheckpoint"
).split()
KERAS = [
    *(f"keras.callbacks.{name}" for name in CALLBACKS),
    *(
        f"keras.{name}"
        for name in (
            "DistributedOptimizer PartialDistributedOptimizer allreduce allgather broadcast reducescatter "
            "broadcast_global_variables load_model elastic.KerasState elastic.CommitStateCallback "
            "elastic.UpdateBatchStateCallback elastic.UpdateEpochStateCallback"
        ).split()
    ),
]
MXNET = (
    "mxnet.allreduce mxnet.allreduce_ mxnet.grouped_allreduce mxnet.grouped_allreduce_ mxnet.allgather "
    "mxnet.grouped_allgather mxnet.broadcast mxnet.broadcast_ mxnet.alltoall mxnet.reducescatter "
    "mxnet.grouped_reducescatter mxnet.broadcast_parameters mxnet.DistributedOptimizer mxnet.DistributedTrainer"
).split()
RAY = (
    "ray.RayExecutor ray.RayExecutor.create_settings ray.RayExecutor.start ray.RayExecutor.run "
    "ray.RayExecutor.run_remote ray.RayExecutor.execute ray.RayExecutor.execute_single ray.RayExecutor.shutdown "
    "ray.ElasticRayExecutor ray.ElasticRayExecutor.create_settings ray.ElasticRayExecutor.start "
    "ray.ElasticRayExecutor.run ray.ray_logger.log ray.BaseHorovodWorker"
).split()
OPTIMIZER = (
    "optimizer named_parameters compression backward_passes_per_step op gradient_predivide_factor num_groups groups "
    "sparse_as_dense process_set synchronize skip_synchronize step zero_grad set_backward_passes_per_step"
).split()
VARIABLES = [
    f"HOROVOD_{name}"
    for name in (
        "FUSION_THRESHOLD CYCLE_TIME CACHE_CAPACITY AUTOTUNE AUTOTUNE_LOG AUTOTUNE_WARMUP_SAMPLES "
        "AUTOTUNE_STEPS_PER_SAMPLE AUTOTUNE_BAYES_OPT_MAX_SAMPLES AUTOTUNE_GAUSSIAN_PROCESS_NOISE "
        "TIMELINE TIMELINE_MARK_CYCLES "
        "STALL_CHECK_DISABLE STALL_CHECK_TIME_SECONDS STALL_SHUTDOWN_TIME_SECONDS LOG_LEVEL LOG_HIDE_TIME "
        "THREAD_AFFINITY NUM_NCCL_STREAMS DYNAMIC_PROCESS_SETS ELASTIC ELASTIC_TIMEOUT START_TIMEOUT "
        "GLOO_TIMEOUT_SECONDS GLOO_IFACE GLOO_RENDEZVOUS_ADDR GLOO_RENDEZVOUS_PORT HOSTNAME CONTROLLER "
        "CPU_OPERATIONS MPI_THREADS_DISABLE HIERARCHICAL_ALLREDUCE HIERARCHICAL_ALLGATHER TORUS_ALLREDUCE"
    ).split()
]
OPTIONS = {
    **dict.fromkeys(("-np", "--num-proc", "--min-np", "--max-np"), "2"),
    **dict.fromkeys(("-H", "--hosts"), "localhost:2"),
    **dict.fromkeys(("-hostfile", "--hostfile", "--config-file", "--host-discovery-script"), "FILE"),
    **dict.fromkeys(("-p", "--ssh-port", "--num-nccl-streams", "--thread-affinity", "--cache-capacity"), "1"),
    **dict.fromkeys(("--start-timeout", "--elastic-timeout", "--gloo-timeout-seconds"), "30"),
    **dict.fromkeys(("-i", "--ssh-identity-file", "--network-interfaces", "--output-filename"), "name"),
    **dict.fromkeys(("--fusion-threshold-mb", "--cycle-time-ms", "--slots-per-host", "--reset-limit"), "3"),
    **dict.fromkeys(("--stall-check-warning-time-seconds", "--stall-check-shutdown-time-seconds"), "3"),
    **dict.fromkeys(("--autotune-warmup-samples", "--autotune-steps-per-sample"), "3"),
    **dict.fromkeys(("--autotune-bayes-opt-max-samples", "--autotune-gaussian-process-noise"), "3"),
    **dict.fromkeys(("--autotune-log-file", "--timeline-filename", "--mpi-args", "--binding-args"), "x"),
    "--blacklist-cooldown-range": "1 2",
    "--log-level": "INFO",
    **dict.fromkeys(
        (
            "--verbose --disable-cache --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather "
            "--no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --tcp --gloo "
            "--timeline-mark-cycles --no-timeline-mark-cycles --stall-check --no-stall-check --mpi-threads-disable "
            "--no-mpi-threads-disable --log-with-timestamp --log-without-timestamp --prefix-output-with-timestamp "
            "--mpi --jsrun"
        ).split(),
        "",
    ),
}
ELASTIC = ("--slots-per-host", "--elastic-timeout", "--reset-limit", "--blacklist-cooldown-range")
SHOW_AND_EXIT = ["-v", "--version", "-cb", "--check-build"]


def read_states(title: str) -> dict[str, str]:
    """Return the names in one section's list, each with its state."""
    found: dict[str, str] = {}
    for names, text in read_list(read_section("reference/horovod-*.md", title)):
        for name in re.findall(r"`([^`]+)`", names):
            assert name not in found, f"{name} is in two items"
            found[name] = text.partition(".")[0]
    assert found
    assert set(found.values()) <= {"works", "works differently", "not there"}
    return found


@pytest.mark.parametrize(
    ("title", "names"),
    [
        ("Functions and classes of `hvd`", FUNCTIONS),
        ("`DistributedOptimizer`", OPTIMIZER),
        ("What `horovod.tensorflow` has", TENSORFLOW),
        ("What `horovod.keras` and `horovod.tensorflow.keras` have", KERAS),
        ("What `horovod.mxnet` has", MXNET),
        ("What `horovod.ray` has", RAY),
        ("Variables", VARIABLES),
        ("Options of `horovodrun`", [*OPTIONS, *SHOW_AND_EXIT]),
        ("Modules", [*(set(modules.MODULES) - {"horovod.common"}), *modules.ABSENT]),
    ],
)
def test_every_name_is_on_the_page_and_no_other(title: str, names: list[str]) -> None:
    assert set(read_states(title)) == set(names)


def exists(name: str) -> bool:
    module, _, last = name.rpartition(".")
    place = getattr(hvd, module) if module else hvd
    return any(hasattr(each, last) for each in (place, exceptions)) or name == engine.run.__name__


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_are_there_or_not_as_the_page_says(name: str) -> None:
    promised = read_states("Functions and classes of `hvd`")[name] != "not there"
    assert exists(name) == (promised and name not in PENDING)


@pytest.mark.parametrize(
    ("title", "package"),
    [
        ("What `horovod.tensorflow` has", "tensorflow"),
        ("What `horovod.keras` and `horovod.tensorflow.keras` have", "keras"),
        ("What `horovod.ray` has", "ray"),
    ],
)
def test_bindings_have_what_the_page_says(title: str, package: str) -> None:
    pytest.importorskip(package, reason=f"needs {package}")
    binding = importlib.import_module(f"engine.{package}")
    for name, said in read_states(title).items():
        found: Any = binding
        for part in name.split(".")[1:]:
            found = getattr(found, part, None)
        assert (found is not None) == (said != "not there"), name


@pytest.mark.parametrize("package", ["tensorflow", "keras", "ray"])
def test_arguments_of_horovod_are_accepted_by_name_and_in_its_order(package: str) -> None:
    """Covers `DistributedOptimizer` of TensorFlow and Keras, the gradient tape, and the executors on Ray."""
    pytest.importorskip(package, reason=f"needs {package}")
    binding = importlib.import_module(f"engine.{package}")
    order = {
        "tensorflow.DistributedOptimizer": (
            "optimizer name use_locking device_dense device_sparse compression sparse_as_dense "
            "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups groups "
            "process_set scale_local_gradients"
        ),
        "tensorflow.DistributedGradientTape": (
            "gradtape device_dense device_sparse compression sparse_as_dense op gradient_predivide_factor num_groups "
            "groups process_set scale_local_gradients"
        ),
        "keras.DistributedOptimizer": (
            "optimizer name device_dense device_sparse compression sparse_as_dense gradient_predivide_factor op "
            "backward_passes_per_step average_aggregated_gradients num_groups groups process_set "
            "scale_local_gradients"
        ),
        "ray.RayExecutor": (
            "settings num_workers num_hosts num_workers_per_host cpus_per_worker use_gpu gpus_per_worker "
            "use_current_placement_group min_workers max_workers reset_limit cooldown_range elastic_timeout "
            "override_discovery"
        ),
        "ray.ElasticRayExecutor": "settings use_gpu cpus_per_slot gpus_per_slot env_vars override_discovery",
    }
    for name, wanted in order.items():
        if name.startswith(f"{package}."):
            function = getattr(binding, name.partition(".")[2])
            assert [*inspect.signature(function).parameters][: len(wanted.split())] == wanted.split(), name


@pytest.mark.parametrize("name", OPTIMIZER)
def test_arguments_and_methods_of_the_optimizer_are_there(name: str) -> None:
    import torch

    arguments = inspect.signature(hvd.DistributedOptimizer).parameters
    engine.init()
    try:
        wrapped = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1))
        assert (name in arguments or callable(getattr(wrapped, name, None))) == (name not in PENDING)
    finally:
        engine.shutdown()


@pytest.mark.parametrize("name", VARIABLES)
def test_variables_set_something_or_nothing_as_the_page_says(name: str) -> None:
    aliases = {each.alias for each in config.list_settings().values()} | set(config.SWITCHES)
    assert not aliases & set(config.WITHOUT_EFFECT)
    if name in PENDING:
        assert name not in aliases
    elif read_states("Variables")[name] == "not there":
        assert name in config.WITHOUT_EFFECT and name not in aliases
    else:
        assert name in aliases


@pytest.mark.parametrize("option", OPTIONS)
def test_options_are_taken_and_do_something_or_nothing_as_the_page_says(option: str, tmp_path: Path) -> None:
    files = {"-hostfile": "localhost slots=2", "--hostfile": "localhost slots=2", "--config-file": "{}"}
    value = OPTIONS[option]
    if option in files:
        path = tmp_path / "file.json"
        path.write_text(files[option])
        value = str(path)
    line = ["-np", "2", option, *value.split(), "true"]
    if option in PENDING:
        with pytest.raises(LaunchError, match="unrecognized arguments"):
            parse(line)
        return
    if option in horovod_options.FAR:
        line = ["-H", "elsewhere:2", *line]
    if option in ELASTIC:
        line = ["--min-np", "1", *line]
    options = parse(line)
    assert options.command == ("true",)
    without_effect = read_states("Options of `horovodrun`")[option] == "not there" and option not in (
        "--min-np",
        "--max-np",
    )
    assert options.ignored == ((option,) if without_effect else ())


@pytest.mark.parametrize("option", SHOW_AND_EXIT)
def test_options_that_show_something_end_well(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse([option])
    assert caught.value.code in (None, 0)
    assert capsys.readouterr().out.startswith("enginerun ")


def test_modules_are_there_or_not_as_the_page_says() -> None:
    finder = modules.Finder()
    for name, said in read_states("Modules").items():
        if said == "not there":
            with pytest.raises(ModuleNotFoundError):
                finder.find_spec(name)
        else:
            assert finder.find_spec(name) is not None
            for source in modules.MODULES[name]:
                lacks_spark = source.startswith("..spark.") and importlib.util.find_spec("pyspark") is None
                if source != "..mxnet" and not lacks_spark:  # tests/mxnet tests it in an environment of its own
                    importlib.import_module(source, "engine.compat")


def test_the_first_diff_is_the_whole_change() -> None:
    (diff,) = re.findall(r"```diff\n(.*?)```", (DOCS / "how-to/horovod.md").read_text(), re.DOTALL)
    removed = [line[1:] for line in diff.splitlines() if line.startswith("-")]
    added = [line[1:] for line in diff.splitlines() if line.startswith("+")]
    assert removed == ["import horovod.torch as hvd", "horovodrun -np 4 python train.py"]
    assert added == ["import engine.torch as hvd", "enginerun -np 4 python train.py"]
    script = Path(__file__).with_name("horovod_script.py").read_text()
    assert script.count("horovod.") == 1 and f"{removed[0]}\n" in script
