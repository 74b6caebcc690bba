"""Whether the Hugging Face hub can be reached, found out at once instead of after a minute of retries."""

import os
import socket
import sys
from functools import cache
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

_TIMEOUT_SECONDS = 5.0


def use_cache_if_unreachable() -> bool:
    """Whether the hub is out of reach; if so, put huggingface_hub and datasets into offline mode.

    It is out of reach if ``HF_HUB_OFFLINE`` is set, or if nothing accepts connections at its address or the proxy's.

    Example:
        >>> os.environ.get("HF_HUB_OFFLINE") != "1" or use_cache_if_unreachable()
        True
    """
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return True
    if _accepts_connections(constants.ENDPOINT):
        return False
    os.environ["HF_HUB_OFFLINE"] = "1"  # for libraries imported later, here and in child processes
    constants.HF_HUB_OFFLINE = True
    if "datasets" in sys.modules:
        sys.modules["datasets"].config.HF_HUB_OFFLINE = True
    return True


@cache
def _accepts_connections(endpoint: str) -> bool:
    """Whether the host of a URL, or its proxy, accepts a connection."""
    url = urlsplit(endpoint)
    host = url.hostname or ""
    proxies = getproxies()
    if (proxy := proxies.get(url.scheme) or proxies.get("all")) and not proxy_bypass(host):
        url = urlsplit(proxy if "//" in proxy else f"//{proxy}")
        host = url.hostname or ""
    try:
        with socket.create_connection((host, url.port or (80 if url.scheme == "http" else 443)), _TIMEOUT_SECONDS):
            return True
    except (OSError, ValueError):
        return False
