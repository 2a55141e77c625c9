"""An authority for a test run, and certificates that it signs. Made by openssl, not by us."""
import functools
import shutil
import subprocess
import tempfile
from pathlib import Path

AVAILABLE = shutil.which("openssl") is not None


def openssl(*arguments):
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@functools.cache
def authority(name="the job"):
    folder = Path(tempfile.mkdtemp(prefix="minidist-tls-"))
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-days", 2, "-subj", f"/CN={name}", "-keyout", folder / "ca.key", "-out",
            folder / "ca.pem")
    return folder


@functools.cache
def certificate(name="node", hosts="IP:127.0.0.1,IP:::1,DNS:localhost", signer="the job"):
    """(certificate, private key, authority's certificate): three files."""
    folder = authority(signer)
    key, request, made = (folder / f"{name}.{end}" for end in ("key", "csr", "pem"))
    (folder / "extensions").write_text(f"subjectAltName={hosts}\n")
    openssl("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
            "-subj", f"/CN={name}", "-keyout", key, "-out", request)
    openssl("x509", "-req", "-in", request, "-CA", folder / "ca.pem", "-CAkey", folder / "ca.key",
            "-CAcreateserial", "-days", 2, "-extfile", folder / "extensions", "-out", made)
    key.chmod(0o600)
    return str(made), str(key), str(folder / "ca.pem")
