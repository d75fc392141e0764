"""Tells which addresses belong to the public internet: the server may contact them for a client."""

from __future__ import annotations

import ipaddress

# Networks that ipaddress calls global in some releases of Python but IANA does not, or that only
# relay to other networks.
_NOT_PUBLIC_4 = [ipaddress.IPv4Network(n) for n in ("192.0.0.0/24", "192.88.99.0/24")]
_NOT_PUBLIC_6 = [ipaddress.IPv6Network(n) for n in ("2001:db8::/32", "3fff::/20")]
# All IPv6 unicast addresses that were ever assigned lie here; site-local ones, for example, do not.
_UNICAST_6 = ipaddress.IPv6Network("2000::/3")
# IPv6 addresses that hold an IPv4 address: mapped ones, and the well-known NAT64 prefix, by which
# machines without IPv4 reach it.
_CARRIES_IPV4 = [ipaddress.IPv6Network(n) for n in ("::ffff:0:0/96", "64:ff9b::/96")]


def is_public(address: str) -> bool:
    """Whether `address`, as a resolver gives it, is a unicast address of the public internet.

    For an address that holds another one (IPv4-mapped, NAT64, 6to4) the inner address is checked
    too. Teredo and IPv4-compatible addresses, and all with a scope, are never public.
    """
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.is_global and not (
            ip.is_multicast or ip.is_reserved or any(ip in n for n in _NOT_PUBLIC_4)
        )
    if ip.scope_id is not None:
        return False
    if any(ip in network for network in _CARRIES_IPV4):
        return is_public(str(ipaddress.IPv4Address(int(ip) & 0xFFFF_FFFF)))
    if ip.sixtofour is not None and not is_public(str(ip.sixtofour)):
        return False
    # Teredo lies in 2001::/23, which is not global.
    return ip in _UNICAST_6 and ip.is_global and not any(ip in network for network in _NOT_PUBLIC_6)
