"""A local HTTP server that misbehaves as told, and the answers it can play."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server:
    """A local HTTP server that plays one prepared answer per request, the last one for ever."""

    def __init__(self):
        self.plays, self.requests = {}, []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                outer.requests.append((self.path, self.headers.get("Range")))
                plays = outer.plays[self.path]
                (plays.pop(0) if len(plays) > 1 else plays[0])(self)

            def log_message(self, *args):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def ranges(self):
        return [requested for _, requested in self.requests]

    def close(self):
        self.http.shutdown()
        self.http.server_close()


def answer(status, body=b"", **headers):
    def play(handler):
        handler.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(body)

    return play


def whole(body, resumes=True, **headers):
    """A good server: honours Range unless told otherwise."""

    def play(handler):
        wanted = re.fullmatch(r"bytes=(\d+)-", handler.headers.get("Range") or "")
        if wanted is None or not resumes:
            return answer(200, body, **headers)(handler)
        start = int(wanted[1])
        if start >= len(body):
            return answer(416, Content_Range=f"bytes */{len(body)}", **headers)(handler)
        content_range = f"bytes {start}-{len(body) - 1}/{len(body)}"
        return answer(206, body[start:], Content_Range=content_range, **headers)(handler)

    return play


def cut(body, at):
    """Announces all of `body`, sends `at` bytes and hangs up."""

    def play(handler):
        answer(200, body[:at], Content_Length=len(body))(handler)
        handler.close_connection = True

    return play


def jump(body):
    return answer(206, body[1:], Content_Range=f"bytes 1-{len(body) - 1}/{len(body)}")


def cut_chunked(body, at):
    """Sends `at` bytes of a chunk that it announced longer, without the length of the whole, and hangs up."""

    def play(handler):
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n" % len(body) + body[:at])
        handler.close_connection = True

    return play


def hang_up(handler):
    handler.close_connection = True


def nonsense(handler):
    handler.wfile.write(b"this is no HTTP\r\n\r\n")
    handler.close_connection = True
