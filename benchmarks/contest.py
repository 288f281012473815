"""Contenders in processes of their own. One that fails is closed, and the others go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from contenders import CONTENDERS
from processes import Failed, FreshProcess
from workload import Workload


class Entry:
    """A contender and its process. `outcome` says why it has none, or why it was closed."""

    def __init__(self, name: str, workload: Workload, runner: type, *args: Any) -> None:
        self.name = name
        self.outcome: dict[str, str] = {}
        self.process: FreshProcess | None = None
        if CONTENDERS[name].gpu_only and not workload.on_gpu:
            self.outcome = {"unavailable": CONTENDERS[name].gpu_only}
            return
        with self._noting_failure():
            self.process = FreshProcess(runner, name, workload, *args)

    def call(self, method: str, *args: Any) -> Any:
        """The result of this method of the runner, or None after a failure."""
        with self._noting_failure():
            return self.process.call(method, *args) if self.process else None

    def close(self) -> None:
        if self.process:
            self.process.close()
            self.process = None

    @contextmanager
    def _noting_failure(self) -> Iterator[None]:
        try:
            yield
        except Failed as failure:
            self.outcome = {"error": str(failure)}
            self.close()


@contextmanager
def entered(names: list[str], load: Callable[[str], Entry]) -> Iterator[list[Entry]]:
    """Their entries, all loaded at once before anything is measured."""
    with ThreadPoolExecutor() as pool:
        entries = list(pool.map(load, names))
    try:
        yield entries
    finally:
        for entry in entries:
            entry.close()
