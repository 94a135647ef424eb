"""Run blocking jobs in a bounded number of threads, and stop at the first error."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor
from concurrent.futures import wait as wait_for

Job = Callable[[], None]


def run_all(jobs: Sequence[Job], workers: int) -> None:
    """Run all jobs, at most `workers` at a time; with one worker in this thread, in order.

    Raises the first error after the jobs that are running have ended; jobs not yet begun are dropped.
    """
    if workers <= 1 or len(jobs) <= 1:
        for job in jobs:
            job()
        return
    failed = threading.Event()

    def guarded(job: Job) -> None:
        if failed.is_set():
            return
        try:
            job()
        except BaseException:
            failed.set()
            raise

    with ThreadPoolExecutor(max_workers=min(workers, len(jobs)), thread_name_prefix="restore") as pool:
        futures = [pool.submit(guarded, job) for job in jobs]
        done, rest = wait_for(futures, return_when=FIRST_EXCEPTION)
        for future in rest:
            future.cancel()
    for future in [*done, *rest]:
        if not future.cancelled():
            future.result()
