import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from logitless.errors import ConfigurationError, InputError
from logitless.rewards.workers import pool as pool_module
from logitless.rewards.workers import programs, worker
from logitless.rewards.workers.confinement import layers
from logitless.rewards.workers.pool import WorkerPool, _Supervisor, shared_pool
from logitless.rewards.workers.worker import Usage
from tests.rewards.processes import none_left, processes_of

BEHAVE = "tests.rewards.hostile:behave"
MEMORY = 200 << 20
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def mark():
    """The name of this module's pool."""
    return f"logitless-test-{uuid.uuid4()}"


@pytest.fixture(scope="module")
def pool(mark):
    with WorkerPool(workers=2, name=mark) as made:
        yield made
    assert none_left(mark)


@pytest.fixture
def lone(mark):
    """A pool of one worker."""
    with WorkerPool(workers=1, name=mark) as made:
        yield made


def statuses(outcomes):
    return [outcome.status for outcome in outcomes]


def behaved(pool, name, way="kept"):
    """The outcome of one hostile item; checks that the other items are done."""
    deadline_seconds = 0.5 if name.endswith(("forever", "hang", "itself", "interpreter")) else 10.0
    items = [("well",)] * 5 + [(name,)] + [("well",)] * 20
    ways = ["kept"] * 5 + [way] + ["kept"] * 20
    outcomes = pool.run(BEHAVE, items, deadline_seconds=deadline_seconds, memory_bytes=MEMORY, ways=ways)
    assert {outcome.status for index, outcome in enumerate(outcomes) if index != 5} == {"done"}
    return outcomes[5]


HOSTILE = {
    "sleep_forever": "idle", "compute_forever": "timeout", "ignore_signals_forever": "idle",
    "hold_the_interpreter": "idle", "stop_itself": "idle", "grow_a_tree_and_hang": "idle",
    "write_half_a_line_and_hang": "idle", "leave_a_daemon": "orphans", "leave_a_daemon_and_exit": "crashed",
    "crash": "crashed", "exit_at_once": "crashed", "close_every_descriptor": "crashed",
    "allocate_without_end": "memory", "exit_politely": "raised", "interrupt": "raised", "recurse": "raised",
    "fail": "raised", "fail_unprintably": "raised", "return_nan": "raised", "return_an_object": "raised",
    "return_too_much": "raised", "print_too_much": "done", "leave_a_busy_thread": "done",
    "leave_a_deadly_thread": "done", "leave_an_alarm": "done", "fork_and_return": "done", "lower_its_limits": "done",
    "flood_every_descriptor": "crashed", "write_to_every_descriptor": "crashed", "flood_with_empty_lines": "crashed",
}  # fmt: skip


REASONS = {"fail": "ValueError: no", "crash": "SIGSEGV", "exit_at_once": "exit code 7"}


@pytest.mark.parametrize("way", ["kept", "fresh"])
@pytest.mark.parametrize(("name", "status"), HOSTILE.items())
def test_a_hostile_item_costs_itself_and_leaves_nothing_running(pool, mark, name, status, way):
    before = pool.counts[status]
    if way == "fresh" and name == "leave_a_daemon_and_exit":
        status = "orphans"
    outcome = behaved(pool, name, way)
    if way == "fresh" and name == "fork_and_return" and outcome.status == "orphans":
        status = "orphans"  # its fork had not ended yet
    assert outcome.status == status
    assert (outcome.message == "") == (status == "done")
    assert REASONS.get(name, "") in outcome.message
    assert pool.counts[status] >= before + (way == "kept")
    supervisor_and_workers = 3
    assert len(processes_of(mark)) <= supervisor_and_workers


def test_the_pool_outlives_its_supervisor(lone):
    outcomes = lone.run(BEHAVE, [("well",), ("kill_its_parent",), ("well",)], deadline_seconds=5)
    assert statuses(outcomes) == ["done", "crashed", "done"]


@pytest.mark.parametrize(("before", "after"), [(100, 100), (400, 20)])
def test_two_slow_items_run_beside_each_other_and_none_waits_behind_one(pool, tmp_path, before, after):
    slow = [("meet", str(tmp_path), other) for other in range(2)]  # neither ends before the other has begun
    outcomes = pool.run(BEHAVE, [("well",)] * before + slow + [("well",)] * after, deadline_seconds=100.0)
    assert statuses(outcomes) == ["done"] * (before + 2 + after)


@pytest.mark.parametrize("left", ["leave_a_busy_thread", "leave_a_deadly_thread", "lower_its_limits"])
def test_a_process_that_an_item_left_another_is_replaced(lone, left):
    lone.load("os:getpid", BEHAVE)
    items = [("os:getpid", ()), ("os:getpid", ()), (BEHAVE, (left,)), ("os:getpid", ())]
    first, second, done, last = (lone.run(task, [item])[0].value for task, item in items)
    assert first == second != last
    assert done == 1


def test_an_alarm_that_an_item_left_is_taken_back(lone):
    lone.load("os:getpid", BEHAVE)
    items = [("os:getpid", ()), (BEHAVE, ("leave_an_alarm",)), (BEHAVE, ("alarm",)), ("os:getpid", ())]
    first, _, alarm, last = (lone.run(task, [item])[0].value for task, item in items)
    assert alarm == [0.0, 0.0]
    assert first == last


@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_that_loads_on_first_use_is_kept(workers):
    items = [("well",), ("load_on_first_use",)] * 300
    with WorkerPool(workers=workers) as pool:
        processes = {outcome.value for _ in range(2) for outcome in pool.run(BEHAVE, items)} - {1}
    # One that was not let while the other came to the end of the batch is replaced; one replaced at its first use would
    # make for a process every few items.
    assert 1 <= len(processes) <= workers + 4


def test_a_watch_that_stood_still_gives_the_item_its_deadline_again(lone, monkeypatch):
    lone.load("time:sleep")
    real, lost = lone._wait, []

    def late(deadline_seconds):
        found = real(deadline_seconds)
        if not found and not lost:
            lost.append(time.sleep(0.3))
            return []
        return found

    monkeypatch.setattr(lone, "_wait", late)
    outcomes = [lone.run("time:sleep", [(seconds,)], deadline_seconds=0.5)[0] for seconds in (1.0, 60.0)]
    assert statuses(outcomes) == ["done", "idle"]


def test_an_item_that_ends_while_it_is_looked_at_has_its_result(lone, monkeypatch):
    lone.load("time:sleep")
    supervisor = lone._processes.supervisor
    real = supervisor.usage

    def later(pid):
        select.select([lone._workers[0].channel], [], [], 300)
        return real(pid)

    monkeypatch.setattr(supervisor, "usage", later)
    assert statuses(lone.run("time:sleep", [(0.6,)], deadline_seconds=0.3)) == ["done"]


def test_a_child_that_ends_while_it_is_looked_at_is_no_orphan(monkeypatch):
    monkeypatch.setattr(worker, "_is_starved", ends_at_once)
    parent = os.fork()
    if parent == 0:
        try:
            if os.fork() == 0:
                time.sleep(1000)
            os._exit(int(worker._has_live_children()))
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(parent, 0)[1]) == 0


def test_a_program_that_ends_while_it_is_looked_at_ended_in_time(monkeypatch):
    monkeypatch.setattr(programs, "usage", lambda pid: Usage(0.0, running=ends_at_once(pid), asleep=True))
    program = os.fork()
    if program == 0:
        try:
            time.sleep(1000)
        finally:
            os._exit(2)
    assert programs._ends_within(program, 0.05)
    os.waitpid(program, 0)


def ends_at_once(pid):
    """Kill the process and return False; it has ended then, and is not collected yet."""
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    return False


def test_memory_counts_for_each_item_alone(pool):
    outcomes = pool.run("builtins:bytes.hex", [(bytes(20 << 10),)] * 50, memory_bytes=16 << 20)
    assert {outcome.status for outcome in outcomes} == {"done"}


def test_threads_share_a_pool_and_each_gets_its_own_results(pool):
    def work(number):
        return [outcome.value for outcome in pool.run("operator:mul", [(number, k) for k in range(50)])]

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(work, range(8))) == [[number * k for k in range(50)] for number in range(8)]


@pytest.mark.parametrize("path", ["no_such_module:f", "math:no_such_name", "math:pi", "math", ":f", ""])
def test_a_path_that_cannot_be_called_is_refused_before_any_item(pool, path):
    with pytest.raises(ConfigurationError, match=r"as 'package\.module:name'"):
        pool.load(path)
    assert pool.run("math:sqrt", [(4.0,)])[0].value == 2.0


@pytest.mark.parametrize("source", ["while True: pass", "import os; os._exit(1)", "raise SystemExit(1)"])
def test_a_module_whose_import_hangs_or_exits_is_refused_and_the_pool_goes_on(lone, tmp_path, monkeypatch, source):
    (tmp_path / "bad_import.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    real = _Supervisor.load

    def load(self, path, call):
        """A limit of one second for the bad module, and a generous one for others."""
        monkeypatch.setattr(pool_module, "START_SECONDS", 1.0 if path == "bad_import:f" else 60.0)
        return real(self, path, call)

    monkeypatch.setattr(_Supervisor, "load", load)
    assert lone.run("math:sqrt", [(4.0,)])[0].value == 2.0
    with pytest.raises(ConfigurationError, match="bad_import"):
        lone.load("bad_import:f")
    assert lone.run("math:sqrt", [(9.0,)])[0].value == 3.0


def test_a_worker_that_keeps_memory_is_replaced_before_the_limit_is_lost(pool):
    outcomes = pool.run(BEHAVE, [("keep_what_it_took",)] * 30, memory_bytes=MEMORY)
    assert {outcome.status for outcome in outcomes} == {"done"}
    pages = (int(Path(f"/proc/{worker.pid}/statm").read_text().split()[0]) for worker in pool._workers)
    largest = max(pages) * os.sysconf("SC_PAGE_SIZE")
    fresh = pool.run("logitless.rewards.workers.worker:_mapped_bytes", [()])[0].value
    assert largest < fresh + MEMORY + (100 << 20)


@pytest.mark.parametrize("when", ["before it answers", "when it has answered"])
def test_a_supervisor_that_ends_while_it_starts_a_worker_is_replaced_and_leaves_no_socket_open(mark, monkeypatch, when):
    make, made, pidfd_of, ended = socket.socketpair, [], os.pidfd_open, []

    def noted(*family):
        made.append(make(*family))
        return made[-1]

    def gone(pid):
        if ended:
            return pidfd_of(pid)
        ended.append(pid)
        raise ProcessLookupError

    with WorkerPool(workers=1, name=mark) as pool:
        pool.load("math:sqrt")
        monkeypatch.setattr(socket, "socketpair", noted)
        if when == "before it answers":
            pool._processes.supervisor._process.kill()
        else:
            monkeypatch.setattr(os, "pidfd_open", gone)
        assert pool.run("math:sqrt", [(4.0,)])[0].value == 2.0
    assert [each.fileno() for pair in made for each in pair] == [-1] * 2 * len(made)
    assert len(made) == 3  # the first worker's channel, and those of the second supervisor and worker


def test_a_supervisor_that_was_killed_after_an_import_is_replaced(lone):
    lone.run("math:sqrt", [(4.0,)])
    supervisor = lone._processes.supervisor
    end = supervisor.end

    def killed(pid):
        supervisor._process.kill()
        supervisor._process.wait()
        return end(pid)

    supervisor.end = killed
    assert lone.run("math:exp", [(0.0,)])[0].value == 1.0


def test_an_item_is_not_to_blame_for_a_worker_that_was_killed_before_it(lone):
    lone.run("math:sqrt", [(4.0,)])
    worker = lone._workers[0]
    os.kill(worker.pid, signal.SIGKILL)
    assert select.select([worker.pidfd], [], [], 300)[0]
    assert lone.run("math:sqrt", [(9.0,)])[0].value == 3.0


def test_an_item_is_not_to_blame_for_a_supervisor_that_is_killed_beside_it(mark, monkeypatch):
    mark = f"{mark}-beside"
    with WorkerPool(workers=2, name=mark) as pool:
        pool.load(BEHAVE, "time:sleep")
        pool.run("time:sleep", [(0.0,)] * 2)
        workers = {worker.pid for worker in pool._workers}
        [supervisor] = list(processes_of(mark) - workers)
        real, killed = pool._wait, []

        def awake(deadline_seconds):
            if not killed and all(worker.item is not None and not worker.outgoing for worker in pool._workers):
                killed.append(os.kill(supervisor, signal.SIGKILL))
            return real(deadline_seconds)

        monkeypatch.setattr(pool, "_wait", awake)
        outcomes = pool.run("time:sleep", [(0.3,)] * 6)
        assert killed
    assert statuses(outcomes) == ["done"] * 6


def test_an_item_that_kills_the_supervisor_is_found_among_those_that_did_not(mark):
    items = [("well",)] * 3 + [("kill_its_grandparent",)] + [("well",)] * 20
    with WorkerPool(workers=2, name=mark) as pool:
        outcomes = pool.run(BEHAVE, items, deadline_seconds=5, ways="fresh")
    assert statuses(outcomes) == ["done"] * 3 + ["crashed"] + ["done"] * 20


def test_a_computing_item_that_was_stopped_is_idle_and_not_to_blame(lone):
    assert statuses(lone.run(BEHAVE, [("compute_and_stop_itself",)], deadline_seconds=1.0)) == ["idle"]


def test_an_item_that_wants_to_compute_and_is_not_let_has_more_time(lone, monkeypatch):
    lone.run(BEHAVE, [("well",)])
    supervisor = lone._processes.supervisor
    seen = iter([Usage(0.0, running=True, asleep=False)] * 3)
    real = supervisor.usage
    monkeypatch.setattr(supervisor, "usage", lambda pid: next(seen, None) or real(pid))
    start = time.monotonic()
    assert statuses(lone.run(BEHAVE, [("compute_forever",)], deadline_seconds=0.2)) == ["timeout"]
    assert time.monotonic() - start >= 4 * 0.2


@pytest.fixture
def seccomp(monkeypatch):
    if "seccomp" not in layers():
        pytest.skip("this kernel or container forbids seccomp")
    # a machine may stand still in many of them
    monkeypatch.setattr("logitless.rewards.workers.pool.MAX_DEADLINES", 1000)


@pytest.mark.parametrize("behaviour", ["sleep_forever", "stop_itself"])
def test_an_item_that_sleeps_or_stops_itself_is_to_blame_in_a_sandbox_alone(pool, seccomp, behaviour):
    outcomes = pool.run(BEHAVE, [(behaviour,)] * 2, deadline_seconds=0.3, ways=["confined", "fresh"])
    assert statuses(outcomes) == ["timeout", "idle"]


def test_an_item_in_a_sandbox_that_sleeps_and_runs_whenever_its_deadline_is_looked_at_is_to_blame(
    lone, monkeypatch, seccomp
):
    lone.run(BEHAVE, [("well",)])
    shown = Usage(0.0, running=True, asleep=False)
    monkeypatch.setattr(lone._processes.supervisor, "usage", lambda pid: shown)
    outcomes = lone.run("time:sleep", [(1000.0,), (0.0,)], deadline_seconds=0.3, ways="confined")
    assert statuses(outcomes) == ["timeout", "done"]
    assert outcomes[0].message == "it slept for 0.3 s"


def test_no_items_start_no_process(mark):
    with WorkerPool(name=f"{mark}-none") as pool:
        assert pool.run("math:sqrt", []) == []
        assert processes_of(f"{mark}-none") == set()


def test_an_item_that_cannot_be_sent_and_limits_that_make_no_sense_are_refused(pool):
    with pytest.raises(InputError, match="sent to another process"):
        pool.run("math:sqrt", [(lambda: 1,)])
    with pytest.raises(InputError, match="positive limits"):
        pool.run("math:sqrt", [(4.0,)], deadline_seconds=0)
    with pytest.raises(InputError, match="at least one worker"):
        WorkerPool(workers=0)


def test_workers_import_neither_torch_nor_numpy(pool):
    heavy = "[name for name in ('torch', 'numpy', 'transformers', 'sympy') if name in __import__('sys').modules]"
    assert pool.run("builtins:eval", [(heavy,)], needs=["logitless.rewards.workers.tasks:score_of"])[0].value == []


SCRIPT = """
import os, signal, sys, threading
from logitless.rewards.workers.pool import WorkerPool
pool = WorkerPool(name=NAME)
def run(name): return pool.run("tests.rewards.hostile:behave", [(name,)] * 2, deadline_seconds=100)
run("well")
print("started", flush=True)
"""


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "1 / 0",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGKILL)).start(); run('grow_a_tree_and_hang')",
        "threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start(); run('grow_a_tree_and_hang')",
    ],
)
def test_however_the_interpreter_ends_no_process_is_left(ending):
    value = f"logitless-test-{uuid.uuid4()}"
    command = [sys.executable, "-W", "error", "-c", f"NAME = {value!r}\n{SCRIPT}{ending}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=600)
    assert ended.stdout == b"started\n"
    assert b"ResourceWarning" not in ended.stderr
    assert none_left(value)


def test_threads_that_come_first_at_the_same_time_share_a_pool(monkeypatch):
    both = threading.Barrier(2)

    class Slow(WorkerPool):
        def __init__(self, **options):
            both.wait(300)
            super().__init__(**options)

    monkeypatch.setattr(pool_module, "WorkerPool", Slow)
    monkeypatch.setattr(pool_module, "_shared", {})
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(shared_pool, ["texts", "texts"])
    assert first is second


def test_a_forked_process_has_a_shared_pool_of_its_own():
    inherited = shared_pool()
    inherited.run("math:sqrt", [(4.0,)])
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            with pytest.raises(InputError, match="made in this process"):
                inherited.run("math:sqrt", [(4.0,)])
            own = shared_pool()
            os.write(writing, str(own.run("math:sqrt", [(16.0,)])[0].value).encode())
            own.close()
        finally:
            os._exit(0)
    os.close(writing)  # a child that fails is read as nothing, and not waited for
    assert os.read(reading, 16) == b"4.0"
    os.waitpid(child, 0)
    os.close(reading)
    assert inherited.run("math:sqrt", [(9.0,)])[0].value == 3.0
    inherited.close()


def test_an_interrupted_run_leaves_a_pool_that_works(tmp_path):
    begun = [tmp_path / "one", tmp_path / "other"]

    def press_ctrl_c():
        while not all(place.exists() for place in begun):
            time.sleep(0.01)
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    with WorkerPool(workers=2) as pool:
        pool.load(BEHAVE)
        thread = threading.Thread(target=press_ctrl_c)
        thread.start()
        with pytest.raises(KeyboardInterrupt):
            pool.run(BEHAVE, [("say_so_and_sleep_forever", str(place)) for place in begun], deadline_seconds=100)
        thread.join()
        assert pool.run(BEHAVE, [("well",)])[0].value == 1
