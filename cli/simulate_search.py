"""Many searches at once over a few processes, with a progress bar."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import Progress

from headrace.cli.simulate_work import Job, run
from headrace.router.simulate.run import Outcome, Times
from headrace.router.simulate.score import STEP, Score, Search
from headrace.router.simulate.spec import Cluster


@dataclass(eq=False)
class Cell:
    """The search of one policy in one mode."""

    mode: str
    policy: str
    cluster: Cluster
    searching: Search
    asked: tuple[int, int] | None = None
    """Load in steps, and seed."""
    score: Score | None = None
    passes: dict[tuple[int, int], Outcome] = field(default_factory=dict)
    """Runs that have passed, each to its last request, by load in steps and seed."""

    @property
    def final(self) -> Outcome | None:
        """The run at the score of the first seed that goes no further; None: nothing passes."""
        if self.score is None:
            return None
        steps = self.score.steps
        return next((self.passes[steps, seed] for seed, most in self.score.by_seed.items() if most == steps > 0), None)

    @property
    def problems(self) -> list[str]:
        """Of the books, in any run that passed."""
        return [
            f"{self.mode} {self.policy} at {steps * STEP:.2f}, seed {seed}: {problem}"
            for (steps, seed), outcome in self.passes.items()
            for problem in outcome.problems
        ]

    def start(self) -> None:
        """Ask for the first run."""
        self.asked = next(self.searching)

    def job(self, trace: Path, times: Times) -> Job | None:
        """What has to be run next; None: nothing any more."""
        if self.asked is None:
            return None
        steps, seed = self.asked
        return Job(trace, self.cluster, self.policy, steps * STEP, seed, times, give_up=True, drain=True)

    def take(self, outcome: Outcome) -> str:
        """The run of the last job is over. Returns a line about it."""
        assert self.asked is not None
        line = f"{self.now}: {_verdict(outcome)}"
        if outcome.passed:
            self.passes[self.asked] = outcome
        try:
            self.asked = self.searching.send(outcome.passed)
        except StopIteration as end:
            self.asked, self.score = None, end.value
            line += f"; the score is {end.value.load:.2f}"
        return line

    @property
    def now(self) -> str:
        """What it is doing, in a few words."""
        return f"{self.mode} {self.policy} {self.asked[0] * STEP:.2f}, seed {self.asked[1]}" if self.asked else ""


def _verdict(outcome: Outcome) -> str:
    measured = outcome.measured
    verdict = "passed" if outcome.passed else "cannot pass any more" if outcome.hopeless else "failed"
    tpot = "" if measured.tpot is None else f", TPOT {measured.tpot.p99 * 1000:.1f} ms"
    return f"{verdict}, p99 TTFT {measured.ttft.p99:.2f} s{tpot}, backlog {measured.backlog_growth:+.3f}"


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
                line = cell.take(done.result())
                if not progress.console.is_terminal:
                    progress.console.print(line, highlight=False, soft_wrap=True)
                waiting.insert(0, cell)
    except BaseException:
        for future in running:
            future.cancel()
        raise


def worker_count(jobs: int | None) -> int:
    """Processes to use: those asked for, or one per core."""
    return jobs or len(os.sched_getaffinity(0))


def _end_with_parent() -> None:
    """In a worker: end when the command ends, however it does. Its queue would keep the worker waiting for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()


@contextmanager
def worker_pool(jobs: int | None) -> Iterator[ProcessPoolExecutor]:
    """Processes that run simulations. New interpreters: a fork would copy the bar's thread half-way."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(worker_count(jobs), mp_context=spawn, initializer=_end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
