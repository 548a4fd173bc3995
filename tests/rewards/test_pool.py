"""The pool of killable processes: limits, order, threads, and nobody left behind."""

import asyncio
import gc
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("math_verify")

from posttrain.rewards.child import Child
from posttrain.rewards.errors import RewardError
from posttrain.rewards.pool import VerifierPool

HALF = r"\frac{\pi}{2}"  # in need of a child, as plain numbers are not
TOWER = r"\boxed{9^{9^{9^9}}}"


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(workers=2, timeout_s=20.0, memory_mb=512) as pool:
        yield pool


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, within=10.0):
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def pids_of(pool):
    return [child.process.pid for child in pool._state.children if child.process.poll() is None]


def test_verdicts_come_in_order(pool):
    pairs = [(rf"\frac{{{n}\pi}}{{7}}", rf"\boxed{{{n + n % 2}\pi/7}}") for n in range(1, 40)]
    assert [verdict.correct for verdict in pool.verify(pairs)] == [n % 2 == 0 for n in range(1, 40)]
    assert pool.verify([]) == []


def test_integers_need_no_child():
    with VerifierPool(workers=1) as pool:
        pairs = [(str(n), rf"so \boxed{{{n if n % 3 else n + 1}}}") for n in range(20_000)]
        started = time.monotonic()
        verdicts = pool.verify(pairs)
        seconds = time.monotonic() - started
        assert [verdict.correct for verdict in verdicts] == [n % 3 != 0 for n in range(20_000)]
        assert pids_of(pool) == [] and pool.counters.fast == 20_000
        assert seconds < 10, "2,000/s would already be far below what is promised"
        assert pool.verify([("5", "no number"), ("0", r"\boxed{-0}")])[1].correct


def test_time_limit_is_for_each_verification():
    with VerifierPool(workers=2, timeout_s=1.0, memory_mb=512) as pool:
        pool.verify([(HALF, r"\boxed{0.5\pi}")])  # one child is up
        pairs = [
            ("5", TOWER),
            ("1/3", r"\boxed{\frac13}"),
            ("5", TOWER),
            (r"\pi/4", r"\boxed{0.25\pi}"),
            ("5", TOWER),
            (r"\pi/5", r"\boxed{0.3\pi}"),
        ]
        verdicts = pool.verify(pairs)
        assert [verdict.correct for verdict in verdicts] == [False, True, False, True, False, False]
        assert [verdict.reason for verdict in verdicts][::2] == ["timeout"] * 3
        assert all(verdict.seconds < 2.5 for verdict in verdicts)
        assert pool.counters.timeouts == pool.counters.restarts == 3
        assert pool.counters.crashes == 0 and pool.counters.verified == 7


def test_gold_that_hangs_or_cannot_be_read_is_none():
    with VerifierPool(workers=1, timeout_s=5.0) as pool:
        verdicts = pool.verify(
            [(r"\frac{1}{", r"\boxed{1}"), (r"\frac{1}{", "nothing"), ("", r"\boxed{1}"), (None, "1"), ("2", "nothing here")]
        )
        assert [verdict.correct for verdict in verdicts] == [None, None, None, None, False]
        assert pool.counters.unreadable_gold == 4


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_AS and /proc are needed")
def test_memory_limit():
    with VerifierPool(workers=1, timeout_s=20.0, memory_mb=16) as pool:
        verdicts = pool.verify([("1/3", r"\boxed{2^{10^{10}}}"), (r"\pi/3", r"\boxed{\pi/3}")])
        assert [(verdict.correct, verdict.reason) for verdict in verdicts] == [(False, "crash"), (True, "match")]
        assert pool.counters.crashes == 2
        for pid in pids_of(pool):
            with open(f"/proc/{pid}/status") as status:
                peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
            assert peak < 400 * 1024


def test_a_dead_child_is_replaced_and_the_work_done_again():
    with VerifierPool(workers=1, timeout_s=20.0) as pool:
        assert pool.verify([(HALF, r"\boxed{0.5\pi}")])[0].correct
        os.kill(pids_of(pool)[0], signal.SIGKILL)
        assert pool.verify([(HALF, r"\boxed{0.5\pi}")])[0].correct
        assert (pool.counters.crashes, pool.counters.restarts) == (1, 1)


def test_what_kills_twice_is_a_crash(monkeypatch):
    verify = Child.verify

    def dying(self, gold, answer, kind, policy):
        if answer and "13" in answer:
            self.process.send_signal(signal.SIGSEGV)
            self.process.wait()
        return verify(self, gold, answer, kind, policy)

    monkeypatch.setattr(Child, "verify", dying)
    with VerifierPool(workers=1, timeout_s=20.0) as pool:
        verdicts = pool.verify([(HALF, r"\boxed{\pi/13}"), (HALF, r"\boxed{0.5\pi}")])
        # killed before the gold was read, twice: nothing is known about the output
        assert [(v.correct, v.reason) for v in verdicts] == [(None, "unreadable_gold"), (True, "match")]
        assert pool.counters.crashes == 2


def test_any_thread_and_event_loop(pool):
    def ask(n):
        return [
            verdict.correct
            for verdict in pool.verify([(rf"{n}\pi/11", rf"\boxed{{\frac{{{n}\pi}}{{11}}}}"), (HALF, r"\boxed{2}")])
        ]

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ask, range(1, 9))) == [[True, False]] * 8

    async def loop():
        return await asyncio.gather(*(asyncio.to_thread(ask, n) for n in range(1, 4)))

    assert asyncio.run(loop()) == [[True, False]] * 3


def test_children_outlive_the_thread_that_asked_first():
    with VerifierPool(workers=1, timeout_s=20.0) as pool:
        thread = threading.Thread(target=pool.verify, args=([(HALF, r"\boxed{0.5\pi}")],))
        thread.start()
        thread.join()
        pids = pids_of(pool)
        assert pool.verify([(HALF, r"\boxed{\pi/2}")])[0].correct
        assert pids_of(pool) == pids and pool.counters.restarts == 0


def test_close_leaves_nobody_and_is_final():
    pool = VerifierPool(workers=2, timeout_s=20.0)
    pool.verify([(HALF, r"\boxed{0.5\pi}"), (r"\pi/3", r"\boxed{0.5\pi}")])
    pids = pids_of(pool)
    assert pids
    pool.close()
    pool.close()
    assert gone(pids)
    assert not any(thread.name.startswith("verifier-") and thread in pool._state.threads for thread in threading.enumerate())
    with pytest.raises(RewardError, match="closed"):
        pool.verify([("1", r"\boxed{1}")])


def test_close_ends_a_verification_in_progress():
    pool = VerifierPool(workers=1, timeout_s=60.0)
    raised = []

    def ask():
        try:
            pool.verify([("5", TOWER)])
        except RewardError as error:
            raised.append(str(error))

    thread = threading.Thread(target=ask)
    thread.start()
    time.sleep(1.0)
    pool.close()
    thread.join(timeout=15)
    assert not thread.is_alive() and len(raised) == 1 and "closed" in raised[0]


def test_a_dropped_pool_takes_its_children_along():
    pool = VerifierPool(workers=1)
    pool.verify([(HALF, r"\boxed{0.5\pi}")])
    pids = pids_of(pool)
    del pool
    gc.collect()
    assert gone(pids)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_children_die_with_a_killed_parent(root):
    script = (
        "import sys, threading, time; from posttrain.rewards.pool import VerifierPool\n"
        "pool = VerifierPool(workers=1, timeout_s=100)\n"
        "pool.verify([('x', r'\\boxed{y}')])\n"
        "print([c.process.pid for c in pool._state.children][0], 'torch' in sys.modules, flush=True)\n"
        f"pool.verify([('5', r'{TOWER}')])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], cwd=root, stdout=subprocess.PIPE, text=True) as parent:
        pid, torch = parent.stdout.readline().split()
        assert torch == "False"
        time.sleep(0.3)
        assert alive(int(pid))
        parent.kill()
    assert gone([int(pid)])


def test_pickles_as_settings():
    with (
        VerifierPool(workers=1, timeout_s=3.0, memory_mb=128, policy={"unboxed_fallback": False}) as pool,
        pickle.loads(pickle.dumps(pool)) as copy,
    ):
        assert (copy.workers, copy.timeout_s, copy.memory_mb, copy.policy.unboxed_fallback) == (1, 3.0, 128, False)
        assert copy.verify([("3", "The answer is 3")])[0].reason == "no_answer"


@pytest.mark.parametrize(
    "bad", [{"workers": 0}, {"timeout_s": 0}, {"timeout_s": float("nan")}, {"memory_mb": 1}, {"workers": True}]
)
def test_bad_settings(bad):
    with pytest.raises(ValueError, match=next(iter(bad))):
        VerifierPool(**bad)


def test_bad_output(pool):
    with pytest.raises(TypeError, match="pair 1"):
        pool.verify([("1", "1"), ("1", None)])


def test_a_child_that_cannot_start_says_why(monkeypatch, tmp_path):
    (tmp_path / "math_verify.py").write_text("raise ImportError('no such verifier')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with VerifierPool(workers=1) as pool:
        monkeypatch.setattr(
            "posttrain.rewards.child._child_environment", lambda: {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.getcwd()}"}
        )
        with pytest.raises(RewardError, match="math-verify installed"):
            pool.verify([(HALF, r"\boxed{0.5\pi}")])
