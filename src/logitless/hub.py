"""Whether the hub of models and data sets can be asked, found out at once instead of after a minute of retries."""

import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_PATIENCE_SECONDS = 5.0


def use_cache_if_unreachable() -> bool:
    """Whether only what is cached can be had; if so, libraries that ask the hub are told, and do not try.

    That is so where ``HF_HUB_OFFLINE`` says it, and where nothing answers at the hub's address (or at the proxy's).

    Example:
        >>> os.environ.get("HF_HUB_OFFLINE") != "1" or use_cache_if_unreachable()
        True
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if _answers(constants.ENDPOINT):
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"  # for what is imported later, here and in child processes
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return True


@cache
def _answers(endpoint: str) -> bool:
    """Whether a connection to the host of a URL can be made."""
    url = urlsplit(endpoint)
    host = url.hostname or ""
    proxies = getproxies()
    if (proxy := proxies.get(url.scheme) or proxies.get("all")) and not proxy_bypass(host):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host = url.hostname or ""
    try:
        with socket.create_connection((host, url.port or (80 if url.scheme == "http" else 443)), _PATIENCE_SECONDS):
            return True
    except (OSError, ValueError):
        return False
