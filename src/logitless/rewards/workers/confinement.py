"""The sandbox of a process that a model's text may take over, made of kernel features for ordinary users and root.

A process enters it after its fork and cannot leave. Its layers: a filter of system calls (seccomp), rules on files
(Landlock), namespaces, another user or no capabilities, and limits. A layer that this machine lacks is left out;
``sandbox.sandbox_of`` tests from inside whether the others suffice. Two kinds of process are confined:

* a *grader* (``confine_grader``): a fork of a clean process in which a library parses a text. It may not write files,
  use the network or touch other processes.
* a *program* (``launch_program``): an interpreter that runs a text. It can read Python's own files and the system's
  libraries, and write in one folder.

Not prevented: asking the kernel what every process may ask (which files exist, the time), using one processor and its
memory until the deadline, and bugs of the kernel. The standard library only; Linux.
"""

import contextlib
import ctypes
import errno
import functools
import json
import os
import platform
import resource
import signal
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from typing import NamedTuple

INTERPRETER_OPTIONS = ("-s", "-P")
"""Keep the user's site folder and the program's folder off the path. ``-I`` would also ignore PYTHONHASHSEED."""

OTHER_USER = 65534
SYSTEM_PATHS = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 24, 22, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT, _MOUNT_SETATTR, _CAPSET = 444, 445, 446, 442, 126
_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET, _CLONE_THREAD = 0x20000000, 0x40000000, 0x10000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4, 8, 4096, 16384, 1 << 18
_READ_ONLY, _AT_RECURSIVE = 1, 0x8000


_NOBODY = b"\xde\xc0\xad\x7b"
"""A placeholder for a process id, which is never that large."""


class Machine(NamedTuple):
    """A processor architecture: its audit number, and the column of its system call numbers in the tables below."""

    audit: int
    column: int


_MACHINES = {"x86_64": Machine(0xC000003E, 0), "aarch64": Machine(0xC00000B7, 1)}
_LAST_CALL = 462
"""The newest system call that this file knows; newer ones do not exist for a confined process."""

# numbers on x86_64 and aarch64; None if there is no such call
_NO_PROCESS = {"fork": (57, None), "vfork": (58, None)}
_NO_EXECUTION = {"execve": (59, 221), "execveat": (322, 281)}
_NO_NETWORK = {
    "socket": (41, 198), "connect": (42, 203), "bind": (49, 200), "listen": (50, 201), "accept": (43, 202),
    "accept4": (288, 242), "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
_NO_OTHER_PROCESS = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440), "process_mrelease": (448, 448), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "setpriority": (141, 140),
    "sched_setparam": (142, 118), "sched_setscheduler": (144, 119), "sched_setattr": (314, 274),
    "sched_setaffinity": (203, 122), "ioprio_set": (251, 30), "migrate_pages": (256, 238), "move_pages": (279, 239),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195), "semget": (64, 190), "semop": (65, 193),
    "semctl": (66, 191), "semtimedop": (220, 192), "msgget": (68, 186), "msgsnd": (69, 189), "msgrcv": (70, 188),
    "msgctl": (71, 187), "mq_open": (240, 180), "mq_unlink": (241, 181), "add_key": (248, 217),
    "request_key": (249, 218), "keyctl": (250, 219),
}  # fmt: skip
_NO_KERNEL = {
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "adjtimex": (159, 171), "clock_adjtime": (305, 266), "personality": (135, 92), "quotactl": (179, 60),
    "vhangup": (153, 58), "iopl": (172, None), "ioperm": (173, None), "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
}  # fmt: skip
_NO_CHANGE_OF_RIGHTS = {  # Landlock has no rule for these
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "fchown": (93, 55), "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "utimensat": (280, 88), "futimesat": (261, None), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "truncate": (76, 45), "mknod": (133, None), "mknodat": (259, 33),
}  # fmt: skip
_NO_WRITING = {
    "creat": (85, None), "unlink": (87, None), "unlinkat": (263, 35), "rename": (82, None), "renameat": (264, 38),
    "renameat2": (316, 276), "mkdir": (83, None), "mkdirat": (258, 34), "rmdir": (84, None), "link": (86, None),
    "linkat": (265, 37), "symlink": (88, None), "symlinkat": (266, 36),
}  # fmt: skip
_ABSENT = {"clone3": (435, 435), "openat2": (437, 437)}  # a filter cannot read their flags; callers use older calls
_CLONE, _KILL, _TGKILL, _PRLIMIT = (56, 220), (62, 129), (234, 131), (302, 261)
_SENDTO, _OPEN, _OPENAT = (44, 206), (2, None), (257, 56)
_OPEN_FOR_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC

_ALWAYS = _NO_PROCESS | _NO_NETWORK | _NO_OTHER_PROCESS | _NO_KERNEL | _NO_CHANGE_OF_RIGHTS
_FORBIDDEN = {"program": _ALWAYS, "grader": _ALWAYS | _NO_EXECUTION | _NO_WRITING}

_READ_FILES, _READ_FOLDERS, _EXECUTE, _WRITE_FILES, _TRUNCATE, _DEVICE_CONTROL = 1 << 2, 1 << 3, 1, 2, 1 << 14, 1 << 15
_OF_A_FILE = _EXECUTE | _WRITE_FILES | _READ_FILES | _TRUNCATE | _DEVICE_CONTROL


@functools.cache
def layers() -> tuple[str, ...]:
    """The layers that this machine supports, each tried by a forked process.

    ``seccomp``, ``landlock``, ``namespaces`` and ``other user`` (root only; others drop capabilities).
    """
    interpreter_path()
    if platform.machine() in _MACHINES:
        for kind in _FORBIDDEN:
            _filter_of_nobody(kind)
    folder = os.path.realpath(tempfile.mkdtemp())
    try:
        return tuple(name for name, trial in _TRIALS.items() if _succeeds(functools.partial(trial, folder)))
    finally:
        os.rmdir(folder)  # noqa: PTH106


@functools.cache
def interpreter_path() -> tuple[str, ...]:
    """``sys.path`` of a fresh interpreter: this process's own may contain the caller's data."""
    command = [sys.executable, *INTERPRETER_OPTIONS, "-c", "import json, sys; print(json.dumps(sys.path))"]
    printed = subprocess.run(command, env={"PATH": os.defpath}, capture_output=True, check=True).stdout
    return tuple(path for path in json.loads(printed) if os.path.isdir(path))  # noqa: PTH112


def confine_grader() -> None:
    """Confine this process: from now on it can read files, compute, and write to open descriptors.

    Raises:
        OSError: a layer that this machine supports failed.
    """
    found = layers()
    _drop_privileges(None)
    if "landlock" in found:
        _restrict_files({"/": _EXECUTE | _READ_FILES | _READ_FOLDERS})
    if "seccomp" in found:
        _filter_calls("grader")


def launch_program(
    command: Sequence[str],
    environment: dict[str, str],
    folder: str,
    streams: tuple[int, int, int],
    limits: dict[int, int],
    sandboxed: bool = True,
) -> int:
    """Start a program in a folder, in a sandbox of all supported layers; returns a process id.

    Killing that process ends the program. Its exit code is the program's, or 128 plus the number of a signal.

    Args:
        command: with an absolute path.
        environment: all of its environment.
        folder: its working folder, and the only one that it may write to.
        streams: descriptors of its standard input, output and error.
        limits: for ``resource.setrlimit``.
        sandboxed: False leaves the sandbox out, and keeps limits, environment and folder.
    """
    folder = os.path.realpath(folder)
    offered = layers() if sandboxed else ()
    user = OTHER_USER if "other user" in offered else None
    if user is not None:
        os.chown(folder, user, user)
    caller = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        os.setsid()
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != caller:  # it has ended already, and no signal will come
            os._exit(127)
        for target, descriptor in enumerate(streams):
            os.dup2(descriptor, target)
        os.closerange(3, 1 << 16)
        if "namespaces" in offered:
            _enter_namespaces()
            inner = os.fork()
            if inner:
                _, status = os.waitpid(inner, 0)
                os._exit(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            _enter_root(folder)
        os.chdir(folder)
        for limit, value in limits.items():
            resource.setrlimit(limit, (value, value))
        if sandboxed:
            _drop_privileges(user)
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a change of user has cleared it
        if "landlock" in offered:
            _restrict_files(_rights_of_a_program(folder))
        if "seccomp" in offered:
            _filter_calls("program")
        os.execve(command[0], list(command), environment)
    finally:
        os._exit(127)


def _readable() -> tuple[str, ...]:
    """What every program must read: the interpreter, its modules, the system's libraries."""
    return (*SYSTEM_PATHS, sys.prefix, sys.base_prefix, *interpreter_path())


def _rights_of_a_program(folder: str) -> dict[str, int]:
    read = _EXECUTE | _READ_FILES | _READ_FOLDERS
    everything = (1 << 13) - 1 | _TRUNCATE
    places = dict.fromkeys(_readable(), read)
    return places | dict.fromkeys(DEVICES, _READ_FILES | _WRITE_FILES) | {folder: everything}


def _call(result: int, what: str) -> int:
    """The result of a C function; raises its error if it is negative."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _drop_privileges(user: int | None) -> None:
    """Drop all capabilities, and become another user unless it is None; setuid programs have no effect any more."""
    _call(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # beyond the last one, or an ordinary user, who has none
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    header = struct.pack("=Ii", 0x20080522, 0)
    number = _CAPSET if platform.machine() == "x86_64" else 91
    _call(_LIBC.syscall(number, header, bytes(24)), "capabilities")


def _restrict_files(rights: dict[str, int]) -> None:
    """Landlock: refuse access to everything not listed, and signals and debugging of processes outside."""
    version = _call(_LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1), "landlock")
    files = (1 << 13) - 1 | (1 << 13 if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    files |= _DEVICE_CONTROL if version >= 5 else 0
    attributes = struct.pack("=Q", files)
    if version >= 4:
        attributes += struct.pack("=Q", 3)  # bind and connect
    if version >= 6:
        attributes += struct.pack("=Q", 3)  # abstract sockets and signals
    ruleset = _call(_LIBC.syscall(_LANDLOCK_CREATE, attributes, len(attributes), 0), "landlock")
    for place, allowed in rights.items():
        try:
            descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
        except OSError:
            continue
        of_kind = files if stat.S_ISDIR(os.fstat(descriptor).st_mode) else files & _OF_A_FILE
        rule = struct.pack("=Qi", allowed & of_kind, descriptor)
        _call(_LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0), "landlock")
        os.close(descriptor)
    _call(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _call(_LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0), "landlock")
    os.close(ruleset)


def _filter_calls(kind: str) -> None:
    """seccomp: the system calls in the lists above fail from now on, in this process and its descendants."""
    program = _filter(kind, os.getpid())
    buffer = ctypes.create_string_buffer(program)
    pointer = struct.pack("@HP", len(program) // 8, ctypes.addressof(buffer))
    _call(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")
    _call(_LIBC.prctl(_PR_SET_SECCOMP, 2, pointer, 0, 0), "seccomp")


def _filter(kind: str, own_pid: int) -> bytes:
    """The filter of one process: the cached filter with the process id filled in."""
    return _filter_of_nobody(kind).replace(_NOBODY, struct.pack("=I", own_pid))


@functools.cache
def _filter_of_nobody(kind: str) -> bytes:
    """The filter in the kernel's packet filter language (BPF); jumps are numbers of instructions to skip."""
    own_pid = struct.unpack("=I", _NOBODY)[0]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allowed, killed, refused, absent = 0x7FFF0000, 0x80000000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS
    machine = _MACHINES[platform.machine()]
    lines: list[tuple[int, int, int, int]] = [
        (load, 0, 0, 4),
        (equal, 1, 0, machine.audit),
        (give, 0, 0, killed),
        (load, 0, 0, 0),
        (at_least, 0, 1, _LAST_CALL + 1),
        (give, 0, 0, absent),
    ]

    def argument(index: int, high: bool = False) -> tuple[int, int, int, int]:
        return load, 0, 0, 16 + 8 * index + 4 * high

    def on(call: tuple[int | None, ...], *block: tuple[int, int, int, int]) -> None:
        number = call[machine.column]
        if number is not None:
            lines.append((equal, 0, len(block), number))
            lines.extend(block)

    no, yes = (give, 0, 0, refused), (give, 0, 0, allowed)
    for call in _FORBIDDEN[kind].values():
        on(call, no)
    for call in _ABSENT.values():
        on(call, (give, 0, 0, absent))
    on(_CLONE, argument(0), (any_bit, 1, 0, _CLONE_THREAD), no, yes)
    for call in (_KILL, _TGKILL):
        on(call, argument(0), (equal, 1, 0, own_pid), no, yes)
    on(_PRLIMIT, argument(0), (equal, 2, 0, 0), (equal, 1, 0, own_pid), no, yes)
    on(_SENDTO, argument(4), (equal, 0, 2, 0), argument(4, high=True), (equal, 1, 0, 0), no, yes)
    if kind == "grader":
        on(_OPEN, argument(1), (any_bit, 0, 1, _OPEN_FOR_WRITING), no, yes)
        on(_OPENAT, argument(2), (any_bit, 0, 1, _OPEN_FOR_WRITING), no, yes)
    lines.append(yes)
    return b"".join(struct.pack("=HBBI", *line) for line in lines)


def _enter_namespaces() -> None:
    """New namespaces of mounts, processes, network, IPC and host name; of users too if that is needed for them."""
    user, group = os.getuid(), os.getgid()
    others = _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWNET | _CLONE_NEWIPC | _CLONE_NEWUTS
    _LIBC.prctl(_PR_SET_DUMPABLE, 1, 0, 0, 0)  # otherwise the files below belong to root
    if _LIBC.unshare(others) < 0:
        _call(_LIBC.unshare(others | _CLONE_NEWUSER), "namespaces")
        for name, content in (
            ("setgroups", "deny"),
            ("uid_map", f"{user} {user} 1"),
            ("gid_map", f"{group} {group} 1"),
        ):
            with open(f"/proc/self/{name}", "w") as file:  # noqa: PTH123
                file.write(content)
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)


def _enter_root(folder: str) -> None:
    """A new root folder with nothing in it but what a program may read, and its own folder; processes are hidden."""
    root = "/proc"  # exists on every machine, and nothing below is mounted from it
    hidden = _MS_NOSUID | _MS_NODEV
    _mount("tmpfs", root, "tmpfs", hidden)
    shown: list[str] = []
    for place in sorted({*_readable(), *DEVICES, folder}):
        if not os.path.exists(place) or any(place.startswith(f"{above}/") for above in shown):  # noqa: PTH110
            continue
        target = root + place
        os.makedirs(os.path.dirname(target), exist_ok=True)  # noqa: PTH103, PTH120
        if os.path.islink(place):  # noqa: PTH114
            os.symlink(os.readlink(place), target)  # noqa: PTH115, PTH211
            continue
        if os.path.isdir(place):  # noqa: PTH112
            os.mkdir(target)  # noqa: PTH102
        else:
            os.close(os.open(target, os.O_CREAT))
        _mount(place, target, None, _MS_BIND | _MS_REC)
        shown.append(place)
    os.makedirs(f"{root}/proc")  # noqa: PTH103
    with contextlib.suppress(OSError):  # refused if parts of /proc are masked, as in containers
        _mount("proc", f"{root}/proc", "proc", hidden | _MS_NOEXEC)
    _set_read_only(os.fsencode(root), on=True, flags=_AT_RECURSIVE)
    _set_read_only(os.fsencode(root + folder), on=False, flags=0)
    os.chroot(root)
    os.chdir("/")


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    encoded = [None if text is None else os.fsencode(text) for text in (source, target, kind)]
    _call(_LIBC.mount(*encoded, ctypes.c_ulong(flags), None), f"mount {target}")


def _set_read_only(place: bytes, on: bool, flags: int) -> None:
    attributes = struct.pack("=QQQQ", _READ_ONLY if on else 0, 0 if on else _READ_ONLY, 0, 0)
    result = _LIBC.syscall(_MOUNT_SETATTR, -100, place, flags, attributes, ctypes.c_size_t(len(attributes)))
    _call(result, f"mount {os.fsdecode(place)}")


def _succeeds(trial: Callable[[], None]) -> bool:
    """Whether the trial raises nothing in a forked process."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            trial()
            code = 0
        os._exit(code)
    return os.waitpid(pid, 0)[1] == 0


def _try_landlock(_folder: str) -> None:
    _restrict_files({"/usr": _READ_FILES})


def _try_seccomp(_folder: str) -> None:
    _filter_calls("program")


def _try_namespaces(folder: str) -> None:
    _enter_namespaces()
    if not _succeeds(functools.partial(_enter_root, folder)):
        raise OSError("a new root folder is refused")


def _try_other_user(_folder: str) -> None:
    """Become the other user, and read what an interpreter needs: it may be in a home folder closed to others."""
    if os.getuid() != 0:
        raise OSError("only root may become another user")
    _drop_privileges(OTHER_USER)
    for place in (os.path.realpath(sys.executable), os.__file__, *interpreter_path()):
        os.close(os.open(place, os.O_RDONLY))


_TRIALS: dict[str, Callable[[str], None]] = {
    "namespaces": _try_namespaces,
    "other user": _try_other_user,
    "landlock": _try_landlock,
    "seccomp": _try_seccomp,
}
