"""An object in a fresh process, so that nothing that ran before has warmed it up."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from typing import Any

# Imported once in the fork server: otherwise each process spends seconds on it.
_PRELOADED = ["accelerate", "hf_static_kv", "hf_static_kv.testing"]
_PRELOADED += ["transformers.generation", "transformers.modeling_utils"]
_PRELOADED += [f"transformers.models.auto.{part}_auto" for part in ("modeling", "tokenization")]


def preload(module: str) -> None:
    """Import this module in the fork server too. Call it before the first process starts."""
    _PRELOADED.append(module)


class Failed(Exception):
    """A call in the other process raised, or the process died: the exception in one line."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(f"{kind}: {message}")


class FreshProcess:
    """`cls(*args)` in a new process with empty compile caches on disk.

    Its methods are called by name. The device is first used after the fork.
    """

    def __init__(self, cls: type, *args: Any) -> None:
        context = _context()
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, cls, args), daemon=False)
        self.process.start()
        theirs.close()
        try:
            self._answer()
        except Failed:
            self.close()
            raise

    def call(self, method: str, *args: Any) -> Any:
        self.connection.send((method, args))
        return self._answer()

    def close(self) -> None:
        """End the process and free its memory. A second call does nothing."""
        self.connection.close()
        self.process.join(timeout=10)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _answer(self) -> Any:
        try:
            result, failure = self.connection.recv()
        except EOFError:
            self.process.join()
            reason = f"exit status {self.process.exitcode}; out of memory?"
            failure = ("ProcessDied", reason)
        if failure:
            raise Failed(*failure)
        return result


def _context() -> Any:
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def _serve(connection: Connection, cls: type, args: tuple[Any, ...]) -> None:
    """Build the object, then answer each call with (result, failure) until the connection closes."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.environ["TRITON_CACHE_DIR"] = os.path.join(folder, "triton")
        served, message = None, ("", args)
        while message is not None:
            method, args = message
            try:
                if served is None:
                    served, result = cls(*args), None
                else:
                    result = getattr(served, method)(*args)
                connection.send((result, None))
            except Exception as error:  # as text: not every exception can be pickled
                first_line = next(iter(str(error).splitlines()), "")
                connection.send((None, (type(error).__name__, first_line)))
            message = _next(connection)


def _next(connection: Connection) -> Any:
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None
