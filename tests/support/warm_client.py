"""Stands in for a Python interpreter: warm_python.py makes an executable of this file.

Training and Ray's workers are forked by its server, which has imported the large libraries. This process passes them
its files, hands signals on and ends as they end. Everything else is for the interpreter itself. It imports little,
because it is started often.
"""

import array
import os
import re
import signal
import socket
import sys

FORKED = re.compile(r"-m (verl\.|gradloc)|\S*/ray/\S+\.py|\S*/embedded/(prepare|run)\.py")
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)


def main(interpreter: str, address: str) -> int:
    command = sys.argv[2:]
    if command[:1] == ["-u"]:
        command = command[1:]
    asked_for = command[:2] == ["-X", "fork"]  # which an interpreter ignores
    if asked_for:
        command = command[2:]
    elif not FORKED.match(" ".join(command[:2])):
        os.execv(interpreter, [interpreter, *sys.argv[2:]])
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError:  # it has ended, and so does the test
        os.execv(interpreter, [interpreter, *sys.argv[2:]])
    # The one that listed them is closed by then.
    files = [int(file) for file in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{file}")]
    files.remove(server.fileno())
    texts = [sys.argv[1], os.getcwd(), str(os.umask(0o022)), ",".join(map(str, files))]
    texts += [str(len(command)), *command, *(f"{name}={value}" for name, value in os.environ.items())]
    message = "\0".join(texts).encode(errors="surrogateescape")
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))]
    server.sendmsg([len(message).to_bytes(8, "little")], rights)
    server.sendall(message)
    for file in files:
        os.close(file)  # a reader must see the end of a pipe when the forked process closes it
    child = int.from_bytes(server.recv(8, socket.MSG_WAITALL), "little")
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _frame: os.kill(child, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    answer = server.recv(8, socket.MSG_WAITALL)
    status = int.from_bytes(answer, "little", signed=True) if answer else -signal.SIGKILL
    if status < 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        os.kill(os.getpid(), -status)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv.pop(1), sys.argv.pop(1)))
