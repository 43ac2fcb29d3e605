"""Where the coordinator is, what is trusted to be it, and the proxy on the way. Plain http is for loopback alone."""

from __future__ import annotations

import ssl
from pathlib import Path
from urllib.request import getproxies_environment, proxy_bypass

from urllib3.exceptions import LocationParseError, LocationValueError
from urllib3.util import Url, parse_url

from fedqueue.errors import ConfigError
from fedqueue.network import is_loopback


def coordinator_url(url: str) -> Url:
    try:
        parsed = parse_url(url)
    except (LocationParseError, LocationValueError):
        raise ConfigError(f"coordinator URL {url!r} is no URL; it looks like https://host:8443") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"coordinator URL {url!r} must begin with https:// and name a host")
    if parsed.auth or parsed.query or parsed.fragment:
        raise ConfigError(f"coordinator URL {parsed._replace(auth=None).url!r} must have no user, '?' or '#'")
    if parsed.scheme == "http" and not is_loopback(parsed.host):
        raise ConfigError(f"coordinator URL {url!r}: plain http is for loopback only; use https")
    return parsed


def trust(ca: Path | None) -> ssl.SSLContext:
    """Verifies the chain and the host's name; with `ca`, that file alone is trusted, be it an authority or a pin."""
    try:
        context = ssl.create_default_context(cafile=ca)
    except (OSError, ssl.SSLError):
        raise ConfigError(f"{ca}: cannot be read as PEM certificates; give the coordinator's certificate") from None
    if ca is not None:
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN  # a pinned certificate need not be its own issuer
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def proxy_for(url: Url, proxy: str | None) -> Url | None:
    """The proxy to go through: the one given, or that of HTTPS_PROXY unless NO_PROXY names the host."""
    host = url.host or ""
    if url.scheme == "http":
        if proxy is not None:
            raise ConfigError(f"plain http to {host} cannot go through a proxy; use https")
        return None
    if proxy is None:
        environment = getproxies_environment()
        where = host.strip("[]") if url.port is None else f"{host.strip('[]')}:{url.port}"
        found = environment.get("https") or environment.get("all")
        if not found or proxy_bypass(where):
            return None
        proxy = found
    try:
        parsed = parse_url(proxy if "://" in proxy else f"http://{proxy}")
    except (LocationParseError, LocationValueError):
        raise ConfigError("the proxy's URL cannot be read; it looks like http://proxy.site:3128") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError("the proxy's URL must begin with http:// or https:// and name a host")
    return parsed
