"""Which processes go on, whoever has started them."""

import psutil


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes_naming(text: str) -> list[psutil.Process]:
    """The processes with the text in their command line."""
    return [each for each in psutil.process_iter(["cmdline"]) if text in " ".join(each.info["cmdline"] or [])]
