"""The operator's list of webhook hosts (PUSH-068).

An entry is a host name, or `*.` and a host name, which stands for every name that ends so with at least one label in
front; the configuration has checked that it is nothing else (PUSH-071). Comparison is literal text without case: a dot
is a dot, and a part of a name never matches.
"""

from __future__ import annotations

from collections.abc import Collection


def host_allowed(host: str, allowed_domains: Collection[str]) -> bool:
    """Whether a webhook's host is on the list. An empty list allows every host.

    Args:
        host: host of a parsed URL: a name without trailing dot, or an address without brackets.
        allowed_domains: entries of `push.http.allowed_domains`.
    """
    return not allowed_domains or any(_matches(host.lower(), entry.lower()) for entry in allowed_domains)


def _matches(host: str, entry: str) -> bool:
    if entry.startswith("*."):
        suffix = entry[1:]
        # A host never starts with a dot, so being longer than the suffix is having a label before it.
        return len(host) > len(suffix) and host.endswith(suffix)
    return host == entry
