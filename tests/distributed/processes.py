"""Starts the ranks of a test: processes of this machine, which end with the test."""

import multiprocessing
import multiprocessing.forkserver
import os
import time
import traceback
from datetime import timedelta
from functools import cache
from multiprocessing.connection import wait
from unittest import mock

import torch

START_LIMIT = 180  # seconds for the imports, on a busy machine
LIMIT = 40  # seconds for what the ranks do
DIED = "died"
GRACE = 5  # seconds that the other ranks have after one has failed


def run_ranks(scenario, world_size, folder, *args, backend="gloo"):
    """What `scenario(rank, *args)` returns in each of `world_size` processes.

    A hang or an error fails the test.
    """
    context, ends, processes = _context(backend), [], []
    store = str(folder / f"store-{time.monotonic_ns()}")  # a file, so that no port can be taken
    try:
        for rank in range(world_size):
            ours, theirs = context.Pipe(duplex=False)
            given = (theirs, scenario, rank, world_size, store, backend, args)
            processes.append(context.Process(target=_run_rank, args=given))
            processes[-1].start()
            theirs.close()
            ends.append(ours)
        results = _collect(ends)
    finally:
        for process in processes:
            if process.is_alive():  # else its id may be that of another process by now
                process.kill()
            process.join()
    errors = {rank: error for rank, (_, error) in results.items() if error}
    for rank in [rank for rank, error in errors.items() if error == DIED]:
        errors[rank] += f" with exit code {processes[rank].exitcode}"  # below 0: of a signal
    errors |= {rank: "no answer" for rank in range(world_size) if rank not in results}
    assert not errors, "\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
    return [results[rank][0] for rank in range(world_size)]


@cache
def _context(backend):
    """Where processes come from: for gloo a server that has imported everything once and is forked
    for every rank.
    """
    if backend == "nccl":
        # A fork of a process that has counted GPUs cannot use them.
        return multiprocessing.get_context("spawn")
    # A process has one server. That of the benchmarks' tests has imported nothing: every rank
    # would, for seconds.
    multiprocessing.forkserver._forkserver._stop()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.distributed.scenarios"])
    # Transformers would give every rank a GPU.
    with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=""):
        first = context.Process(target=int)
        first.start()
    first.join(START_LIMIT)
    assert first.exitcode == 0, "the server of the ranks did not start"
    return context


def _collect(ends):
    """{rank: (result, error)} of the ranks that answered in time."""
    results, waiting, deadline = (
        {},
        {end: rank for rank, end in enumerate(ends)},
        time.monotonic() + START_LIMIT,
    )
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(waiting), timeout=left):
            try:
                answer = end.recv()
            except EOFError:
                answer = None, DIED
            if answer == "started":
                deadline = time.monotonic() + LIMIT
                continue
            results[waiting.pop(end)] = answer
            if answer[1]:
                deadline = min(deadline, time.monotonic() + GRACE)
    return results


def _run_rank(end, scenario, rank, world_size, store, backend, args):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    end.send("started")
    try:
        torch.distributed.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=LIMIT),
        )
        end.send((scenario(rank, *args), None))
    except BaseException:
        end.send((None, traceback.format_exc()))
    os._exit(0)  # without the destructors of the group, which would wait for a rank that has failed
