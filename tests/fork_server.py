"""Starts Python programs from a process that has imported torch already: a test waits for its run, not for imports.

`python tests/fork_server.py FD` imports what the program needs and runs nothing: no operator, no thread, for a child
that is forked has none of the threads. Then it forks a child for each request that comes over the socket FD. The child
becomes what `python -m NAME …`, `python FILE …` or `python -c CODE …` would be: its own session, environment, folder,
streams, `sys.argv`, `__main__`, exit code. What differs: modules are imported already, its parent is the server,
/proc/PID/cmdline and environ are the server's, and the interpreter is not taken apart at the end. A test that is about
one of these starts a process of its own instead.

A child that loads images in worker processes starts a fork server of multiprocessing's, which would import torch once
more. It is forked from here, too: over the socket at ADDRESS, since the child itself has threads and cannot fork. With
FRESH_WORKERS=1 in its environment that server is started anew, as a child of the child.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import importlib.util
import io
import json
import multiprocessing.util
import os
import pkgutil
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

# Read by the interpreter, by OpenMP and by torch while they start: the same in all children, for they have started.
EARLY = ("PYTHON", "LD_", "LC_", "LANG", "OMP_", "GOMP_", "MKL_", "OPENBLAS_", "TORCH_LOGS", "THP_")
# As the program itself sets them before it imports torch (accel_train.launch.environment), on one thread.
SETTINGS = {
    "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000", "THP_MEM_ALLOC_ENABLE": "1",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a thread of pyarrow's, which scikit-learn imports
}  # fmt: skip
LATER = ("sklearn.metrics", "timm", "torch._dynamo", "torchvision.datasets")
"""What many runs import when they need it, as each of torch's optimizers does torch._dynamo: for a second or more."""
POLL_SECONDS = 0.01
ADDRESS = f"\0accel-train-tests-{os.getpid()}"  # in no folder, and gone with the server; only Linux has such names


class Forked:
    """A child of the server, with what the tests use of subprocess.Popen: also its zombie stays until it is polled."""

    def __init__(self, server: ForkServer, args: list[str], pid: int) -> None:
        self._server, self.args, self.pid = server, args, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code (for a signal: minus its number), or None while the process runs."""
        if self.returncode is None:
            self.returncode = self._server.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raises subprocess.TimeoutExpired after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if timeout is not None and deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # else its number may be another's by now
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client of the server, in the tests' process."""

    def __init__(self) -> None:
        self._socket, other = socket.socketpair()
        self._lock = threading.Lock()
        environment = os.environ | SETTINGS
        self._early = _early(environment)
        with other:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(other.fileno())],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=[other.fileno()],
                start_new_session=True,  # Ctrl-C is for the tests, which then end their runs themselves
            )  # fmt: skip

    def popen(
        self, words: Sequence[object], env: Mapping[str, str], stdout: BinaryIO, stderr: BinaryIO, cwd: Path | None
    ) -> Forked:
        """Start `python WORDS` with nothing on stdin.

        Raises ValueError if `env` has other settings of what is read before the first line of the program.
        """
        args = [str(word) for word in words]
        if (early := _early(env)) != self._early:
            raise ValueError(f"a forked process cannot have {early}, but {self._early}: start a fresh one")
        request = {"args": args, "env": dict(env), "cwd": str(cwd or Path.cwd())}
        stdout.flush()
        with Path(os.devnull).open("rb") as nothing:
            pid = self.ask(request, [nothing.fileno(), stdout.fileno(), stderr.fileno()])
        return Forked(self, [sys.executable, *args], pid)

    def ask(self, request: dict[str, Any], files: Sequence[int] = ()) -> Any:
        """Send a request and return the server's answer."""
        with self._lock:
            _send(self._socket, request, files)
            answer = _receive(self._socket)
            if answer is None:
                raise EOFError("the fork server has ended: its error is on stderr")
            return answer[0]

    def close(self) -> None:
        self._socket.close()
        self._process.wait()


@functools.cache
def server() -> ForkServer:
    """Return this process's server, which ends with the process."""
    found = ForkServer()
    atexit.register(found.close)
    return found


def _send(connection: socket.socket, message: Any, files: Sequence[int] = ()) -> None:
    """Send a message, its length first, and open files with it."""
    content = json.dumps(message).encode()
    socket.send_fds(connection, [len(content).to_bytes(4, "little")], files)
    connection.sendall(content)


def _receive(connection: socket.socket) -> tuple[Any, list[int]] | None:
    """Return the next message and its files, or None if the other side has closed the connection."""
    header, files, _, _ = socket.recv_fds(connection, 4, 8, socket.MSG_WAITALL)
    if not header:
        return None
    return json.loads(connection.recv(int.from_bytes(header, "little"), socket.MSG_WAITALL)), list(files)


def _early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read early, with the program's own settings as defaults."""
    found = {name: value for name, value in environment.items() if name.startswith(EARLY) and name != "PYTHONPATH"}
    return SETTINGS | found


def _import_all() -> None:
    """Import the package, and the modules that it imports later."""
    import accel_train

    for module in pkgutil.walk_packages(accel_train.__path__, "accel_train."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    for name in LATER:
        importlib.import_module(name)
    threads = list(Path("/proc/self/task").iterdir()) if Path("/proc/self/task").exists() else [Path()]
    assert len(threads) == 1, f"an import has begun threads, which forked children lack: {threads}"
    gc.collect()
    gc.freeze()  # the children share these pages as long as nobody writes into them


def _serve(connection: socket.socket, listener: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """Answer requests until the tests end: None. In each child that is forked: its request, and its files."""
    children: set[int] = set()
    unpolled: set[int] = set()  # children that no test asks for
    while True:
        ready, _, _ = select.select([connection, listener], [], [])
        unpolled -= {child for child in unpolled if os.waitpid(child, os.WNOHANG)[0]}
        if listener in ready:
            with listener.accept()[0] as client:
                received = _receive(client)
            if received is not None:
                if (child := _fork(received[1])) == 0:
                    return received
                unpolled.add(child)
            continue
        received = _receive(connection)
        if received is None:
            for child in children | unpolled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(child, signal.SIGKILL)
            return None
        request, files = received
        if "poll" in request:
            ended, status = os.waitpid(request["poll"], os.WNOHANG)
            children -= {ended}
            _send(connection, os.waitstatus_to_exitcode(status) if ended else None)
        else:
            if (child := _fork(files)) == 0:
                return received
            children.add(child)
            _send(connection, child)


def _fork(files: list[int]) -> int:
    """Return the number of a new child, whose `files` are closed here; 0 in the child."""
    child = os.fork()
    if child:
        for file in files:
            os.close(file)
    return child


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Give the child the state of a new interpreter."""
    os.setsid()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    numbers = request.get("numbers", [0, 1, 2])
    above = [fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, max(numbers) + 1) for file in files]  # none is overwritten
    for file in files:
        os.close(file)
    for number, file in zip(numbers, above[: len(numbers)], strict=True):
        os.dup2(file, number)
        os.close(file)
    multiprocessing.util.spawnv_passfds = functools.partial(_spawn, multiprocessing.util.spawnv_passfds)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.get("blocked", []))
    unbuffered = bool(os.environ.get("PYTHONUNBUFFERED"))
    out, err = (io.FileIO(number, "w", closefd=False) for number in (1, 2))
    sys.stdin = sys.__stdin__ = io.TextIOWrapper(io.BufferedReader(io.FileIO(0, closefd=False)))  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(  # type: ignore[misc]
        out if unbuffered else io.BufferedWriter(out), "utf-8", write_through=unbuffered
    )
    sys.stderr = sys.__stderr__ = io.TextIOWrapper(  # type: ignore[misc]
        io.BufferedWriter(err), "utf-8", "backslashreplace", line_buffering=True
    )
    sys.modules["numpy"].random.seed()  # of its own, as torch's and Python's are
    sys.orig_argv = [sys.executable, *request["args"]]


def _spawn(spawn: Callable[..., int], executable: Any, args: list[Any], passed: Sequence[int]) -> int:
    """multiprocessing.util.spawnv_passfds, but a fork server of multiprocessing's comes from this file's.

    Returns the number of a child that lives as long as that server does: its own parent is another, but this process
    asks the operating system whether it has ended.
    """
    is_server = str(args[-1]).startswith("from multiprocessing.forkserver import main")
    if not is_server or os.environ.get("FRESH_WORKERS"):
        return spawn(executable, args, passed)
    request = {
        "args": ["-c", args[-1]], "env": dict(os.environ), "cwd": str(Path.cwd()), "numbers": [1, 2, *passed],
        "blocked": [*map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))],
    }  # fmt: skip
    lives, held = os.pipe()
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(ADDRESS)
        _send(client, request, [*request["numbers"], held])
    os.close(held)
    stands_in = spawn(b"/bin/cat", ["cat", f"/dev/fd/{lives}"], [lives])
    os.close(lives)
    return stands_in


def _program(args: list[str]) -> tuple[types.CodeType, types.ModuleType]:
    """Return the code that `python ARGS` runs, and its `__main__` module."""
    main = types.ModuleType("__main__")
    if args[0] == "-m":
        spec = importlib.util.find_spec(args[1])
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{args[1]}.__main__")
        assert spec is not None and spec.origin is not None, args[1]
        main.__spec__, main.__file__, main.__package__ = spec, spec.origin, spec.parent
        code, first, rest, path = spec.loader.get_code(spec.name), spec.origin, args[2:], str(Path.cwd())  # type: ignore[attr-defined, union-attr]
    elif args[0] == "-c":
        code, first, rest, path = compile(args[1], "<string>", "exec"), "-c", args[2:], ""
    else:
        main.__file__ = args[0]
        code, first, rest = compile(Path(args[0]).read_bytes(), args[0], "exec"), args[0], args[1:]
        path = str(Path(args[0]).resolve().parent)
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    sys.path[:1] = places if os.environ.get("PYTHONSAFEPATH") else [path, *places]
    sys.argv = [first, *rest]
    sys.modules["__main__"] = main
    return code, main


def _run(code: types.CodeType, main: types.ModuleType) -> int:
    """Run the program and return its exit code; -SIGINT after Ctrl-C."""
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _end(code: int) -> None:
    """Wait for threads, call what is to be called at exit, flush, and end. An interpreter would take itself apart, too,
    module by module: that takes longer than many a test's run."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = 120  # as Python's own
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


if __name__ == "__main__":
    _import_all()
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(fileno=int(sys.argv[1])) as connection:
        listener.bind(ADDRESS)
        listener.listen()
        connection.setblocking(True)
        begun = _serve(connection, listener)
    if begun is None:
        os._exit(0)  # without the reports of what is frozen
    else:
        _become(*begun)
        _end(_run(*_program(begun[0]["args"])))
