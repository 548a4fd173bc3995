"""Workers killed from outside while they verify: nothing is lost, counted twice or given to another pair."""

import os
import random
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")

from posttrain.rewards.errors import RewardError
from posttrain.rewards.pool import VerifierPool, _State

PAIRS = [(rf"\frac{{{n}\pi}}{{97}}", rf"\boxed{{{n + (n % 3 == 0)}\pi/97}}") for n in range(1, 97)]
EXPECTED = [n % 3 != 0 for n in range(1, 97)]


def test_killed_workers_lose_and_double_nothing():
    with VerifierPool(workers=2, timeout_s=60.0) as pool:
        done, kills = threading.Event(), [0]
        chance = random.Random(0)

        def kill_now_and_then():
            while not done.wait(0.4):
                running = [child for child in list(pool._state.children) if child.ready and child.process.poll() is None]
                if running and kills[0] < 5:
                    os.kill(chance.choice(running).process.pid, signal.SIGKILL)
                    kills[0] += 1

        killer = threading.Thread(target=kill_now_and_then)
        killer.start()
        try:
            with ThreadPoolExecutor(3) as threads:
                rounds = list(threads.map(lambda _: pool.verify(PAIRS), range(3)))
        finally:
            done.set()
            killer.join()
        # A pair whose worker dies twice would be a crash; with so few kills none should be.
        for verdicts in rounds:
            assert [verdict.correct for verdict in verdicts] == EXPECTED
        assert pool.counters.verified == 3 * len(PAIRS)
        assert pool.counters.timeouts == 0
        assert pool.counters.crashes == pool.counters.restarts <= kills[0]


def test_a_worker_killed_while_it_starts_is_started_again(monkeypatch):
    admit, killed = _State.admit, []

    def kill_the_first(self, child):
        admit(self, child)
        if not killed:
            killed.append(child.process.pid)
            os.kill(child.process.pid, signal.SIGKILL)

    monkeypatch.setattr(_State, "admit", kill_the_first)
    with VerifierPool(workers=1, timeout_s=60.0) as pool:
        assert pool.verify([(r"\pi/2", r"\boxed{0.5\pi}")])[0].correct is True
        assert (pool.counters.crashes, pool.counters.restarts, pool.counters.verified) == (1, 1, 1)


def test_workers_that_are_always_killed_are_an_error(monkeypatch):
    admit = _State.admit

    def kill_all(self, child):
        admit(self, child)
        os.kill(child.process.pid, signal.SIGKILL)

    monkeypatch.setattr(_State, "admit", kill_all)
    with VerifierPool(workers=1, timeout_s=60.0) as pool, pytest.raises(RewardError, match="signal 9 while it started"):
        pool.verify([(r"\pi/2", r"\boxed{0.5\pi}")])


def test_same_answers_in_any_number_of_workers_and_threads():
    with VerifierPool(workers=1, timeout_s=60.0) as one, VerifierPool(workers=3, timeout_s=60.0) as three:
        alone = [verdict.correct for verdict in one.verify(PAIRS)]
        with ThreadPoolExecutor(2) as threads:
            rounds = list(threads.map(lambda _: [v.correct for v in three.verify(PAIRS)], range(2)))
    assert alone == EXPECTED and rounds == [EXPECTED] * 2


@pytest.mark.slow
def test_inside_a_ray_actor():
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:

        @ray.remote(num_cpus=1, max_concurrency=2)
        class Judge:
            def __init__(self):
                self.pool = VerifierPool(workers=1, timeout_s=60.0)

            def verify(self, pairs):
                return [verdict.correct for verdict in self.pool.verify(pairs)]

            def hang(self):
                with VerifierPool(workers=1, timeout_s=1.0) as pool:
                    return pool.verify([("1/3", r"\boxed{9^{9^{9^9}}}")])[0].reason

        judge = Judge.remote()
        first, second = ray.get([judge.verify.remote(PAIRS[:12]), judge.verify.remote(PAIRS[12:24])], timeout=300)
        assert first + second == EXPECTED[:24]
        assert ray.get(judge.hang.remote(), timeout=300) == "timeout"
    finally:
        ray.shutdown()
