"""A certificate authority for one run: the fakes speak real TLS, and clients trust this authority alone."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

_LIFETIME = datetime.timedelta(days=30)
_SLACK = datetime.timedelta(hours=1)
LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


@dataclass(frozen=True)
class Leaf:
    """A server certificate with its key, as PEM."""

    certificate: bytes
    key: bytes


class Authority:
    """Issues server certificates; `pem` is what a client has to trust."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("fakes authority")
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self._certificate = (
            _builder(self._name, self._name, self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )

    @property
    def pem(self) -> bytes:
        """The authority's certificate."""
        return self._certificate.public_bytes(Encoding.PEM)

    def issue(self, *names: str, local: bool = True, expired: bool = False) -> Leaf:
        """A certificate for host names and addresses; unless not `local`, also for 127.0.0.1, ::1 and localhost."""
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [_alternative(name) for name in dict.fromkeys((*names, *(LOCAL_NAMES if local else ())))]
        age = _LIFETIME + 2 * _SLACK if expired else datetime.timedelta()
        certificate = (
            _builder(_name("fakes server"), self._name, key.public_key(), age)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return Leaf(
            certificate.public_bytes(Encoding.PEM),
            key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()),
        )


def server_context(leaf: Leaf, folder: Path, alpn: tuple[str, ...]) -> ssl.SSLContext:
    """TLS settings of a server; the certificate passes through a file in `folder`, as Python's ssl asks for one."""
    path = folder / "server.pem"
    path.write_bytes(leaf.key + leaf.certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    context.set_alpn_protocols(list(alpn))
    return context


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    age: datetime.timedelta = datetime.timedelta(),
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC) - age
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SLACK)
        .not_valid_after(now + _LIFETIME)
    )
