"""Functions that behave as badly as users' functions can; run by name in workers."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

KEPT = []
LOADED = []


def behave(name, *arguments):
    return globals()[name](*arguments)


def well():
    return 1


def load_on_first_use():
    """The id of this process; slow at the first call."""
    if not LOADED:
        time.sleep(0.3)
        LOADED.append(1)
    return os.getpid()


def sleep_forever():
    time.sleep(1000)


def meet(folder, other):
    """Wait until another item has begun too."""
    Path(folder, f"before-{other}").touch()
    while len(list(Path(folder).iterdir())) < 2:
        time.sleep(0.002)
    return 1


def say_so_and_sleep_forever(place):
    Path(place).touch()
    time.sleep(1000)


def compute_and_stop_itself():
    begun = time.process_time()
    while time.process_time() < begun + 0.05:
        pass
    os.kill(os.getpid(), signal.SIGSTOP)


def alarm():
    return signal.getitimer(signal.ITIMER_REAL)


def compute_forever():
    while True:
        pass


def ignore_signals_forever():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)


def hold_the_interpreter():
    ctypes.PyDLL(None).sleep(1000)  # a C call that keeps the interpreter lock: no Python code runs meanwhile


def stop_itself():
    os.kill(os.getpid(), signal.SIGSTOP)


def grow_a_tree_and_hang():
    for _ in range(3):
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.setsid()
            time.sleep(1000)
    time.sleep(1000)


def leave_a_daemon():
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        time.sleep(1000)
    os.waitpid(child, 0)
    return 1


def fork_and_return():
    os.fork()
    return 1


def lower_its_limits():
    resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
    return 1


def keep_what_it_took():
    KEPT.append(bytearray(60 << 20))
    return 1


def flood_every_descriptor():
    while True:
        for descriptor in range(3, 16):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"x" * 65536)


def flood_with_empty_lines():
    while True:
        for descriptor in range(3, 16):
            with contextlib.suppress(OSError):
                os.write(descriptor, b"\n" * 100)


def leave_a_daemon_and_exit():
    leave_a_daemon()
    os._exit(3)


def leave_a_busy_thread():
    threading.Thread(target=compute_forever, daemon=True).start()
    return 1


def leave_a_deadly_thread():
    threading.Thread(target=lambda: (time.sleep(300), os._exit(1)), daemon=True).start()
    return 1


def leave_an_alarm():
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 300)
    return 1


def allocate_without_end():
    taken = []
    while True:
        taken.append(bytearray(10_000_000))


def crash():
    ctypes.string_at(0)


def exit_at_once():
    os._exit(7)


def exit_politely():
    sys.exit(0)


def interrupt():
    raise KeyboardInterrupt


def recurse():
    return recurse()


def fail():
    raise ValueError("no")


def fail_unprintably():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    raise Mute


def return_nan():
    return float("nan")


def return_an_object():
    return object()


def return_too_much():
    return "x" * 5_000_000


def print_too_much():
    print("x" * 5_000_000)
    return 1


def write_to_every_descriptor():
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"nonsense\n")
    return 1


def write_half_a_line_and_hang():
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, b"nons")
    time.sleep(1000)


def close_every_descriptor():
    os.closerange(3, 256)
    return 1


def kill_its_parent():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(1000)


def kill_its_grandparent():
    with Path(f"/proc/{os.getppid()}/stat").open() as file:
        supervisor = int(file.read().rpartition(")")[2].split()[1])
    os.kill(supervisor, signal.SIGKILL)
    time.sleep(1000)
