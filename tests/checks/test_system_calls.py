"""Rules about calls that some systems lack, waits without a limit on what may never end, and written files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection
from pathlib import Path

from .syntax import list_calls, list_nodes, parse_rooms

ROOT = Path(__file__).parents[2]
ROOMS = ("engine", "autotune")
# Files that wait without a limit for a process that was killed or has ended: nothing there keeps a lease. In
# `discovery` and `remote` the waiting thread does nothing else, and nobody waits for it.
UNLIMITED = {
    "engine/launch/elastic/discovery.py",
    "engine/launch/hosts/remote.py",
    "engine/runner/function.py",
    "engine/spark/elastic.py",
    "engine/spark/hosting.py",  # a task waits for its agent; Spark ends both
}


def files_with(is_odd: Callable[[ast.Call], bool]) -> set[str]:
    """Return the files that contain such a call."""
    return {name for name, tree in parse_rooms(*ROOMS).items() if any(map(is_odd, list_calls(tree)))}


def lines_with(is_odd: Callable[[ast.Call], bool], but: Collection[str] = ()) -> set[str]:
    """Return the lines that contain such a call, in all files `but` these."""
    return {
        f"{name}:{call.lineno}"
        for name, tree in parse_rooms(*ROOMS).items()
        if name not in but
        for call in list_calls(tree)
        if is_odd(call)
    }


def test_calls_that_some_builds_of_python_lack_go_through_host_linux() -> None:
    found = {
        f"{name}:{node.lineno}"
        for name, tree in parse_rooms(*ROOMS).items()
        if name != "engine/host/linux.py"
        for node in list_nodes(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "os"
        and node.attr in ("pidfd_open", "memfd_create")
    }
    assert found == set()


# Files that ask for the working directory themselves: outside of the engine, or with absolute paths only.
DIRECTORIES = {"engine/host/machine.py", "engine/compat/startup/sitecustomize.py", "autotune/policies.py"}


def test_a_working_directory_that_was_removed_has_an_error_in_one_place() -> None:
    asks = (".getcwd", ".cwd", ".abspath", ".absolute")
    assert files_with(lambda call: ast.unparse(call.func).endswith(asks)) == DIRECTORIES


def test_processes_are_waited_for_with_a_limit() -> None:
    """A process in an uninterruptible wait does not end, even by SIGKILL."""

    def waits_without_limit(call: ast.Call) -> bool:
        return (
            isinstance(call.func, ast.Attribute)
            and call.func.attr in ("wait", "communicate")
            and ast.unparse(call.func.value).endswith(("process", "launcher", "popen", "child", "agent"))
            and not call.args
            and not call.keywords
        )

    assert files_with(waits_without_limit) == UNLIMITED


def test_commands_and_children_are_waited_for_with_a_limit() -> None:
    """`subprocess.run` and similar calls have a `timeout`, and `os.waitpid` polls instead of waiting."""

    def waits_without_limit(call: ast.Call) -> bool:
        text = ast.unparse(call.func)
        if text == "os.waitpid":
            return not any("WNOHANG" in ast.unparse(each) for each in call.args)
        runs = text in {f"subprocess.{each}" for each in ("run", "call", "check_call", "check_output")}
        return runs and not any(keyword.arg == "timeout" for keyword in call.keywords)

    assert lines_with(waits_without_limit) == set()


# Files that look names up, which a dead name server may block for any time, and why no lease runs out.
LOOK_UPS = {
    "engine/host/network.py": "functions of which the others below tell",
    "engine/launch/fixed_policy.py": "a fixed job, whose ranks are not started yet, and whose agents have no lease",
    "engine/launch/cli/doctor.py": "an examination",
    "engine/launch/elastic/agent_pool.py": "in a thread",
    "engine/launch/hosts/host_list.py": "this machine's own names, before any agent is started",
    "engine/launch/hosts/remote.py": "the report on a job that could not be started",
    "engine/metrics/export/endpoint.py": "where to listen, before ranks are started, or in a rank",
    "engine/ray/actor.py": "an actor that becomes a rank",
    "engine/net/rendezvous/hub.py": "a rank that meets the others",
    "engine/net/rendezvous/hub_client.py": "a rank that meets the others",
    "engine/spark/job.py": "the caller of a job, before tasks are started",
    "engine/spark/task_channel.py": "a task that calls its driver",
}
_LOOKING_UP = {f"socket.{name}" for name in ("getaddrinfo", "gethostbyname", "getfqdn", "create_connection")}
_LOOKING_UP |= {f"network.{name}" for name in ("resolve", "own_address", "is_own_name")}


def test_names_are_looked_up_only_where_no_lease_runs_out() -> None:
    assert files_with(lambda call: ast.unparse(call.func) in _LOOKING_UP) == set(LOOK_UPS)


# Files that write without `engine.host.private_files`, and why.
WRITERS = {
    "engine/host/private_files.py": "it is the rule",
    "autotune/journal.py": "autotune imports nothing of the engine; a new file of mode 0600",
    "autotune/result_cache.py": "autotune imports nothing of the engine; drafts of mode 0600",
    "engine/metrics/export/files.py": "for Prometheus, which is another user",
    "engine/metrics/dashboards.py": "for Grafana, which is another user",
    "engine/foresee/command.py": "a picture that the user asks for",
    "engine/spark/store.py": "the store of Spark's estimators, of any file system",
    "engine/spark/writer.py": "the store of Spark's estimators, of any file system",
    "engine/spark/horovod_runner.py": "/dev/null",
}
MAKERS = frozenset("write_text write_bytes touch mkdir makedirs mkstemp NamedTemporaryFile symlink symlink_to".split())
OPENERS = frozenset({"open", "fdopen"})


def makes_files(call: ast.Call) -> bool:
    """Return whether a call makes a file or a directory, or opens a file for writing."""
    text = ast.unparse(call.func)
    name = text.rpartition(".")[2]
    if name in MAKERS:
        return text not in ("self._recorder.write_text", "self.write_text")  # methods of this project
    modes = [*call.args[:2], *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    if text == "os.open":
        return any("O_CREAT" in ast.unparse(argument) for argument in call.args)
    if name in OPENERS and not any("private_files" in ast.unparse(argument) for argument in call.args[:1]):
        written = [mode.value for mode in modes if isinstance(mode, ast.Constant) and isinstance(mode.value, str)]
        return any(len(mode) <= 3 and set(mode) & set("wax+") for mode in written)
    return False


def test_files_are_written_through_private_files() -> None:
    assert files_with(makes_files) == set(WRITERS)


def test_a_call_that_makes_a_file_is_known_as_one() -> None:
    makes = ["open(path, 'w')", "path.open('ab')", "os.open(path, os.O_WRONLY | os.O_CREAT)", "path.write_text(text)"]
    makes += ["os.fdopen(number, 'x')", "path.parent.mkdir(parents=True)", "tempfile.mkstemp()", "open(p, mode='r+')"]
    leaves = [
        "open(path)",
        "open(path, 'rb')",
        "os.open(path, os.O_RDONLY)",
        "tempfile.mkdtemp()",
        "core.open(ranks)",
    ]
    leaves += ["open(private_files.open_file(path), 'w')"]
    for text in makes + leaves:
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        assert makes_files(call) == (text in makes), text


BROAD = {"Exception", "BaseException"}


def tells_exception(node: ast.AST, names: set[str]) -> bool:
    """Return whether a node makes text of one of these variables, whose `__str__` is foreign code."""
    value = None
    if isinstance(node, ast.FormattedValue):
        value = node.value
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("str", "repr") and node.args:
        value = node.args[0]
    return isinstance(value, ast.Name) and value.id in names


def exceptions_of(node: ast.AST) -> set[str]:
    """Return the names that a handler or a function gives to exceptions of any kind."""
    if isinstance(node, ast.ExceptHandler):
        kinds, names = [node.type], [node.name]
    elif isinstance(node, ast.FunctionDef):
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        kinds, names = [each.annotation for each in given], [each.arg for each in given]
    else:
        return set()
    return {
        name
        for kind, name in zip(kinds, names, strict=True)
        if name and kind and BROAD & {each.id for each in ast.walk(kind) if isinstance(each, ast.Name)}
    }


def test_exceptions_of_any_kind_are_formatted_in_one_place() -> None:
    """An exception whose `__str__` raises is reported all the same."""
    found = {
        f"{name}:{inner.lineno}"
        for name, tree in parse_rooms(*ROOMS).items()
        if name not in ("engine/errors/formatting.py", "engine/exit_report/writer.py")  # the second imports nothing
        for node in list_nodes(tree)
        if (names := exceptions_of(node))
        for inner in ast.walk(node)
        if tells_exception(inner, names)
    }
    assert found == set()


# Connections of scrapers, which retry, and of the tuner's process, which imports nothing of the engine.
OTHER_CONNECTIONS = {"engine/metrics/export/endpoint.py", "autotune/daemon.py"}


def test_calls_on_connections_outlive_a_shortage_of_memory() -> None:
    """Calls on connections use `engine.host.sockets`: ENOBUFS and ENOMEM do not end a connection."""
    receiving = ("recv", "recv_into", "recvmsg", "sendall", "sendmsg", "accept", "send_fds", "recv_fds")

    def is_direct(call: ast.Call) -> bool:
        return isinstance(call.func, ast.Attribute) and (
            call.func.attr in receiving
            or (call.func.attr == "send" and ast.unparse(call.func.value).endswith(("connection", "socket")))
        )

    assert lines_with(is_direct, but=OTHER_CONNECTIONS) == set()


# Files that write a program's output, or rich's, to a terminal unchanged, and why.
RAW_WRITERS = {
    "engine/text/readable.py": "it is the rule",
    "autotune/terminal.py": "the rule for autotune, which imports nothing of the engine",
    "engine/launch/process/output.py": "what ranks print, as they print it",
    "engine/launch/job.py": "lines of the launcher, made plain where they are written",
    "engine/ray/elastic.py": "lines of the launcher, made plain where they are written",
    "engine/spark/task.py": "what ranks print, on its way to Spark's logs",
    "engine/spark/horovod_runner.py": "what ranks print for the driver",
    "engine/spark/training.py": "a line of numbers",
    "engine/keras/callbacks.py": "a line of numbers",
    "engine/session/monitor.py": "the traceback of this rank's own program",
}
_STREAMS = ("stdout.write", "stderr.write", "stdout.buffer.write", "stderr.buffer.write")
_CONSOLES = ("self._console.write", "self._out.write", "self._err.write")


def test_texts_reach_a_terminal_through_print_plain() -> None:
    """Texts of files, peers and ranks are printed by `print_plain` or autotune's `say`, which make them plain."""

    def writes(call: ast.Call) -> bool:
        text = ast.unparse(call.func)
        return text == "print" or text.endswith(_STREAMS) or text in _CONSOLES

    assert files_with(writes) == set(RAW_WRITERS)


# Every listening socket, and the source of its address: the first argument of `network.listen`.
PORTS = {
    "engine/elastic/worker/gate.py": ["address"],  # ENGINE_INTERFACE's; None: none is chosen
    "engine/launch/fixed_ranks.py": ["address or None"],  # that of --network-interface
    "engine/launch/cli/doctor.py": ["address or None"],  # that of --network-interface
    "engine/ray/actor.py": ["bound"],  # that of `nics`, or else of the node
    "engine/net/rendezvous/invitation.py": ["chosen"],  # ENGINE_INTERFACE's
    "engine/net/rendezvous/hub.py": ["chosen", "address"],  # ENGINE_INTERFACE's, or where others look for rank 0
    "engine/net/rendezvous/hub_client.py": ["chosen or connection.here.host"],  # ENGINE_INTERFACE's, or of the hub
    "engine/net/rendezvous/set_connections.py": ["own"],  # that of the world's connections
    "engine/spark/task_channel.py": ["host"],  # `listening_address`
    "engine/spark/task.py": ["chosen"],  # ENGINE_INTERFACE's
}
BINDERS = {
    "engine/host/network.py": "`listen` is the rule; a probe that does not listen",
    "engine/host/machine.py": "a probe that does not listen",
    "engine/launch/hosts/host_list.py": "a probe that does not listen",
    "engine/launch/elastic/worker_server.py": "a name of this host's network namespace; others' users are hung up on",
    "engine/net/rendezvous/local_server.py": "a name of this host's network namespace; others' users are hung up on",
    "engine/spark/task_registry.py": "a file in a directory of this user alone",
    "engine/metrics/export/endpoint.py": "metrics, on the address that the user gives, or the loopback",
}
_BINDING = ("bind", "server_bind", "create_server", "start_server", "start_unix_server", "HTTPServer", "TCPServer")


def test_ports_are_bound_to_the_address_that_is_chosen() -> None:
    """`tests/hosts/test_listeners.py` shows for each port what strangers can do there."""
    listening: dict[str, list[str]] = {}
    binding = set()
    for name, tree in parse_rooms(*ROOMS).items():
        for call in list_calls(tree):
            text = ast.unparse(call.func)
            if text == "network.listen":
                listening.setdefault(name, []).append(ast.unparse(call.args[0]))
            elif text.rpartition(".")[2] in _BINDING and not name.startswith("engine/jax/"):  # primitives' bind
                binding.add(name)
    assert listening == PORTS
    assert binding == set(BINDERS)
