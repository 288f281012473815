"""Starts the ranks of a test: processes on this machine that talk through gloo, and end with the test."""

import multiprocessing
import os
import time
import traceback
from datetime import timedelta
from multiprocessing.connection import wait

PATIENCE = 40  # seconds for all of a scenario, on a busy machine
GRACE = 5  # seconds that the other ranks have after one has failed

# A server that has imported everything once; every rank is a fork of it.
_SERVER = multiprocessing.get_context("forkserver")
_SERVER.set_forkserver_preload(["tests.distributed.scenarios"])


def run_ranks(scenario, world_size, folder, *args):
    """`scenario(rank, *args)` in `world_size` processes: what each rank returned. A hang or an error fails the test."""
    store, ends, processes = folder / f"store-{time.monotonic_ns()}", [], []
    for rank in range(world_size):
        ours, theirs = _SERVER.Pipe(duplex=False)
        process = _SERVER.Process(target=_run_rank, args=(theirs, scenario, rank, world_size, str(store), args))
        process.start()
        theirs.close()
        ends.append(ours)
        processes.append(process)
    try:
        results = _collect(ends)
    finally:
        for process in processes:
            process.kill()
            process.join()
    errors = {rank: error for rank, (_, error) in results.items() if error}
    errors |= {rank: "no answer" for rank in range(world_size) if rank not in results}
    assert not errors, "\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items()))
    return [results[rank][0] for rank in range(world_size)]


def _collect(ends):
    """{rank: (result, error)} of the ranks that answered in time."""
    results, waiting, deadline = {}, dict(enumerate(ends)), time.monotonic() + PATIENCE
    while waiting and (left := deadline - time.monotonic()) > 0:
        for end in wait(list(waiting.values()), timeout=left):
            rank = next(rank for rank, other in waiting.items() if other is end)
            del waiting[rank]
            try:
                results[rank] = end.recv()
            except EOFError:
                results[rank] = None, "died"
            if results[rank][1]:
                deadline = min(deadline, time.monotonic() + GRACE)
    return results


def _run_rank(end, scenario, rank, world_size, store, args):
    import torch

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=PATIENCE)
        )
        end.send((scenario(rank, *args), None))
    except BaseException:
        end.send((None, traceback.format_exc()))
    os._exit(0)  # without the group's destructors, which would wait for a rank that has failed
