"""A server in memory that answers Google's and Azure's clients, as their documentation says: the few calls that a shared store makes."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

CONTAINER = "afterglow-kv"
PAGE = 3  # objects of one page of a listing
_MODIFIED = "2026-01-02T03:04:05.000Z"
_DATE = formatdate(1767323045.0, usegmt=True)


class CloudServer:
    """Objects by name in one container. `signed`: what each call was authorized with. `status`: to answer all calls with, if not 0."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.signed: list[str] = []
        self.status = 0
        self.url = ""
        self.lock = threading.Lock()


@contextlib.contextmanager
def cloud_server() -> Iterator[CloudServer]:
    """Run such a server."""
    cloud = CloudServer()
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(cloud))
    server.daemon_threads = True
    cloud.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield cloud
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _handler(cloud: CloudServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            where = urlsplit(self.path)
            container, _, name = unquote(where.path).lstrip("/").partition("/")
            asked = {key: values[0] for key, values in parse_qs(where.query).items()}
            with cloud.lock:
                cloud.signed.append(self.headers.get("Authorization", ""))
                if cloud.status or container != CONTAINER:
                    self.say(cloud.status or 404)
                elif asked.get("comp") == "batch":
                    self.batch(body)
                elif not name:
                    (self.azure_listing if "comp" in asked else self.google_listing)(asked)
                elif self.command == "PUT":
                    self.put(name, body)
                elif self.command == "DELETE":
                    self.say(204 if cloud.objects.pop(name, None) is not None else 404)
                else:
                    self.get(name)

        def put(self, name: str, body: bytes) -> None:
            azure, google = self.headers.get("If-None-Match"), self.headers.get("x-goog-if-generation-match")
            if name in cloud.objects and (azure == "*" or google == "0"):
                self.say(409 if azure else 412)
                return
            cloud.objects[name] = body
            self.say(201 if "x-ms-version" in self.headers else 200)

        def get(self, name: str) -> None:
            data = cloud.objects.get(name)
            if data is None:
                self.say(404)
                return
            part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if part is None:
                self.say(200, data)
            elif int(part[1]) >= len(data):
                self.say(416)
            else:
                found = data[int(part[1]) : int(part[2]) + 1]
                where = f"bytes {part[1]}-{int(part[1]) + len(found) - 1}/{len(data)}"
                self.say(206, found, {"Content-Range": where})

        def batch(self, body: bytes) -> None:
            """Azure's deletions: calls within a call."""
            calls = re.findall(rb"Content-ID: (\d+)\r\n\r\nDELETE /[^/]+/(\S+) HTTP", body)
            parts = []
            for number, name in calls:
                there = cloud.objects.pop(unquote(name.decode()), None) is not None
                line = "202 Accepted" if there else "404 The specified blob does not exist."
                code = "" if there else "x-ms-error-code: BlobNotFound\r\n"
                head = f"--b\r\nContent-Type: application/http\r\nContent-ID: {number.decode()}\r\n\r\n"
                parts.append(f"{head}HTTP/1.1 {line}\r\n{code}\r\n")
            data = "".join([*parts, "--b--\r\n"]).encode()
            self.say(202, data, {"Content-Type": "multipart/mixed; boundary=b"})

        def page(self, asked: dict[str, str], after: str) -> tuple[list[str], str]:
            """A page of names, and where the next one begins."""
            names = sorted(name for name in cloud.objects if name.startswith(asked.get("prefix", "")))
            first = int(asked.get(after, 0))
            return names[first : first + PAGE], str(first + PAGE) if first + PAGE < len(names) else ""

        def google_listing(self, asked: dict[str, str]) -> None:
            names, further = self.page(asked, "continuation-token")
            found = "".join(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{_MODIFIED}</LastModified>"
                f'<ETag>"e"</ETag><Size>{len(cloud.objects[name])}</Size></Contents>'
                for name in names
            )
            token = f"<NextContinuationToken>{further}</NextContinuationToken>" if further else ""
            self.say(200, f"<ListBucketResult>{found}{token}</ListBucketResult>".encode())

        def azure_listing(self, asked: dict[str, str]) -> None:
            names, further = self.page(asked, "marker")
            found = "".join(
                f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{_DATE}</Last-Modified>"
                f"<Content-Length>{len(cloud.objects[name])}</Content-Length><Content-Type>a/b</Content-Type>"
                "<Etag>e</Etag><BlobType>BlockBlob</BlobType></Properties></Blob>"
                for name in names
            )
            listing = f"<Blobs>{found}</Blobs><NextMarker>{further}</NextMarker>"
            self.say(200, f'<?xml version="1.0"?><EnumerationResults>{listing}</EnumerationResults>'.encode())

        def say(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in {"ETag": '"e"', "Last-Modified": _DATE, **(headers or {})}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

        def log_message(self, *_: object) -> None:
            pass

    return Handler
