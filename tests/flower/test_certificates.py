"""`certificates.sh` of the Flower app: what each certificate is accepted for, with real TLS."""

from __future__ import annotations

import os
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

import noisewise.flower

SCRIPT = Path(noisewise.flower.__file__).parent / "template" / "certificates.sh.txt"


def make(
    folder: Path, *words: str, text: str | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run the script, or a changed copy of it, in ``folder``."""
    script = folder / "certificates.sh"
    script.write_text(text or SCRIPT.read_text())
    return subprocess.run(
        ["sh", "certificates.sh", *words],
        cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip


def openssl(*words: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["openssl", *map(str, words)], capture_output=True, text=True, timeout=600, check=False
    )


def sound(keys: Path) -> bool:
    """Whether openssl's strict rules accept the server's certificate for TLS."""
    options = ("-x509_strict", "-purpose", "sslserver", "-verify_ip", "127.0.0.1")
    return (
        openssl("verify", *options, "-CAfile", keys / "ca.crt", keys / "server.pem").returncode == 0
    )


def shakes_hands(trusted: Path, chain: Path, key: Path, host: str = "localhost") -> bool:
    """Whether a client that trusts one authority accepts a server with this chain and key."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(chain, key)
    client = ssl.create_default_context(cafile=str(trusted))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    ours, theirs = socket.socketpair()

    def serve() -> None:
        with theirs:
            try:
                server.wrap_socket(theirs, server_side=True).close()
            except OSError:
                return  # the client has refused

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours, client.wrap_socket(ours, server_hostname=host):
            return True
    except ssl.SSLError:
        return False
    finally:
        thread.join()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("operator")
    out = make(folder, "keys", "localhost", "127.0.0.1", "site-0", "site-1")
    assert out.returncode == 0, out.stderr
    assert "move this folder to an offline medium" in out.stdout
    return folder


def test_each_certificate_may_do_one_thing(made: Path) -> None:
    words = ("-noout", "-ext", "basicConstraints,keyUsage,extendedKeyUsage,subjectAltName")
    authority = openssl("x509", "-in", made / "keys/ca.crt", *words).stdout
    for expected in ("Basic Constraints: critical\n    CA:TRUE, pathlen:0",
                     "Key Usage: critical\n    Certificate Sign, CRL Sign"):  # fmt: skip
        assert expected in authority
    server = openssl("x509", "-in", made / "keys/server.pem", *words).stdout
    for expected in ("Basic Constraints: critical\n    CA:FALSE",
                     "Key Usage: critical\n    Digital Signature\n",
                     "Extended Key Usage: \n    TLS Web Server Authentication\n",
                     "DNS:localhost, IP Address:127.0.0.1"):  # fmt: skip
        assert expected in server
    for days, ends in ((364, 0), (366, 1)):
        path = made / "keys/server.pem"
        assert openssl("x509", "-in", path, "-noout", "-checkend", days * 86400).returncode == ends


def test_the_authority_is_apart_and_keys_are_private(made: Path) -> None:
    assert sorted(path.name for path in (made / "authority").iterdir()) == ["ca.crt", "ca.key"]
    names = ["ca.crt", "server.key", "server.pem", "site-0", "site-0.pub", "site-1", "site-1.pub"]
    assert sorted(path.name for path in (made / "keys").iterdir()) == names
    for folder in (made / "authority", made / "keys"):
        assert folder.stat().st_mode & 0o777 == 0o700
        assert all(path.stat().st_mode & 0o077 == 0 for path in folder.iterdir())
    assert [path.name for path in made.iterdir() if path.name.startswith(".")] == []


def test_a_real_handshake(made: Path) -> None:
    keys = made / "keys"
    assert sound(keys)
    files = keys / "ca.crt", keys / "server.pem", keys / "server.key"
    assert shakes_hands(*files)
    assert shakes_hands(*files, host="127.0.0.1")
    assert not shakes_hands(*files, host="other.example.org")
    purpose = openssl("verify", "-purpose", "sslclient", "-CAfile", files[0], files[1])
    assert purpose.returncode != 0  # it cannot be a client's


def test_the_server_key_cannot_sign(made: Path, tmp_path: Path) -> None:
    keys = made / "keys"
    (tmp_path / "ext").write_text("subjectAltName=DNS:localhost\nextendedKeyUsage=serverAuth\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-384", "-nodes", "-subj",
            "/CN=localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "csr")  # fmt: skip

    def sign(certificate: Path, key: Path) -> bool:
        openssl("x509", "-req", "-in", tmp_path / "csr", "-CA", certificate, "-CAkey", key,
                "-set_serial", "1", "-extfile", tmp_path / "ext", "-days", "1",
                "-out", tmp_path / "leaf")  # fmt: skip
        chain = tmp_path / "chain"
        chain.write_text((tmp_path / "leaf").read_text() + certificate.read_text())
        options = ("-CAfile", keys / "ca.crt", "-untrusted", certificate, tmp_path / "leaf")
        accepted = openssl("verify", "-purpose", "sslserver", *options).returncode == 0
        assert accepted or not shakes_hands(keys / "ca.crt", chain, tmp_path / "key")
        return accepted

    assert not sign(keys / "server.pem", keys / "server.key")
    assert sign(made / "authority/ca.crt", made / "authority/ca.key")  # so the check has power


def test_renewal_keeps_the_authority_and_overwrites_nothing(made: Path) -> None:
    before = {path: path.read_bytes() for path in made.rglob("*") if path.is_file()}
    out = make(made, "keys-2", "localhost", "127.0.0.1")
    assert out.returncode == 0, out.stderr
    assert (made / "keys-2/ca.crt").read_bytes() == (made / "keys/ca.crt").read_bytes()
    assert (made / "keys-2/server.key").read_bytes() != (made / "keys/server.key").read_bytes()
    renewed = made / "keys-2/server.pem", made / "keys-2/server.key"
    assert shakes_hands(made / "keys/ca.crt", *renewed)  # with the authority that sites have
    again = make(made, "keys", "localhost", "127.0.0.1")
    assert again.returncode == 2
    assert "keys exists: keys are not overwritten" in again.stderr
    assert {path: path.read_bytes() for path in before} == before


def test_an_expiring_authority_is_refused(tmp_path: Path) -> None:
    short = SCRIPT.read_text().replace("-days 3650", "-days 300")
    assert make(tmp_path, "keys", "localhost", "127.0.0.1", text=short).returncode == 0
    out = make(tmp_path, "keys-2", "localhost", "127.0.0.1")
    assert out.returncode == 2
    assert "expires within 365 days" in out.stderr


@pytest.mark.parametrize(
    "words",
    [
        ("keys", "localhost"),
        ("keys", "a,IP:10.0.0.1", "127.0.0.1"),
        ("keys", "a\nb", "127.0.0.1"),
        ("keys", "localhost", "127.0.0.1, DNS:other"),
        ("keys", "localhost", "1.2.3"),
        ("-keys", "localhost", "127.0.0.1"),
        ("keys", "localhost", "127.0.0.1", "../site"),
        ("keys", "localhost", "127.0.0.1", "server.key"),
        ("keys", "localhost", "127.0.0.1", "twice", "twice"),
    ],
)
def test_a_wrong_word_makes_nothing(words: tuple[str, ...], tmp_path: Path) -> None:
    assert make(tmp_path, *words).returncode != 0
    assert [path.name for path in tmp_path.iterdir()] == ["certificates.sh"]


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("extendedKeyUsage = serverAuth", "extendedKeyUsage = clientAuth"),
        ("critical, keyCertSign, cRLSign", "critical, cRLSign"),
        ("critical, CA:TRUE, pathlen:0", "critical, CA:FALSE"),
        ("subjectAltName = DNS:$host, IP:$address", "subjectAltName = DNS:other, IP:10.0.0.1"),
    ],
)
def test_the_checks_notice_a_wrong_extension(right: str, wrong: str, tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    assert right in text
    changed = text.replace(right, wrong)
    assert make(tmp_path, "keys", "localhost", "127.0.0.1", text=changed).returncode != 0
    unchecked = "\n".join(line for line in changed.splitlines() if " verify " not in line)
    out = make(tmp_path, "keys", "localhost", "127.0.0.1", text=unchecked)
    assert out.returncode == 0, out.stderr
    keys = tmp_path / "keys"
    assert not sound(keys)
    assert not shakes_hands(keys / "ca.crt", keys / "server.pem", keys / "server.key")
