"""Many searches at once over a few processes, with a progress bar."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.progress import Progress

from headrace.cli.simulate_work import Job, run
from headrace.router.simulate.run import Outcome, Times
from headrace.router.simulate.score import STEP, Score, Search
from headrace.router.simulate.spec import Cluster


@dataclass(eq=False)
class Cell:
    """The search of one policy in one mode, and its last run: at the score, drained to the end."""

    mode: str
    policy: str
    cluster: Cluster
    searching: Search
    asked: tuple[int, int] | None = None
    score: Score | None = None
    final: Outcome | None = None

    def job(self, trace: Path, times: Times) -> Job | None:
        """What has to be run next; None: nothing any more."""
        if self.score is None and self.asked is not None:
            steps, seed = self.asked
            return Job(trace, self.cluster, self.policy, steps * STEP, seed, times, give_up=True)
        if self.score is not None and self.final is None and self.score.steps:
            seed = min(self.score.by_seed, key=lambda one: (self.score.by_seed[one], one) if self.score else (0, 0))
            return Job(trace, self.cluster, self.policy, self.score.load, seed, times, drain=True)
        return None

    def start(self) -> None:
        """Ask for the first run."""
        self.asked = next(self.searching)

    def take(self, outcome: Outcome) -> None:
        """The run of the last job is over."""
        if self.score is not None:
            self.final = outcome
            return
        try:
            self.asked = self.searching.send(outcome.passed)
        except StopIteration as end:
            self.asked, self.score = None, end.value

    @property
    def now(self) -> str:
        """What it is doing, in a few words."""
        at = f"{self.asked[0] * STEP:.2f}, seed {self.asked[1]}" if self.asked else "last run"
        return f"{self.mode} {self.policy} {at}"


def search_all(
    cells: Sequence[Cell], pool: ProcessPoolExecutor, trace: Path, times: Times, workers: int, progress: Progress
) -> None:
    """Run all searches to their end, as many runs at a time as there are workers."""
    waiting = list(cells)
    running: dict[Future[Outcome], Cell] = {}
    task = progress.add_task("searches", total=len(cells))
    for cell in cells:
        cell.start()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                cell = waiting.pop(0)
                job = cell.job(trace, times)
                if job is None:
                    progress.advance(task)
                    continue
                running[pool.submit(run, job)] = cell
            progress.update(task, description="; ".join(cell.now for cell in running.values()) or "searches")
            if not running:
                continue
            for done in wait(running, return_when=FIRST_COMPLETED).done:
                cell = running.pop(done)
                cell.take(done.result())
                if not progress.console.is_terminal and cell.score is not None and cell.final is None:
                    progress.console.print(f"{cell.mode} {cell.policy}: {cell.score.load:.2f}", highlight=False)
                waiting.insert(0, cell)
    except BaseException:
        for future in running:
            future.cancel()
        raise


def worker_count(jobs: int | None) -> int:
    """Processes to use: those asked for, or one per core."""
    return jobs or len(os.sched_getaffinity(0))


@contextmanager
def worker_pool(jobs: int | None) -> Iterator[ProcessPoolExecutor]:
    """Processes that run simulations. New interpreters: a fork would copy the bar's thread half-way."""
    with ProcessPoolExecutor(worker_count(jobs), mp_context=multiprocessing.get_context("spawn")) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
