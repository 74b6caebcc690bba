"""A real HTTP server on loopback whose replies a test sets."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


def said(text):
    """A chat completion with this text."""
    return 200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode()


@contextmanager
def judging(answer):
    """The url of a server, and the list of its requests.

    Args:
        answer: called with the number of a request and its body; gives status and bytes, ``"wait"`` and seconds to
            wait before, or None and all that is sent.
    """
    requests, lock, over = [], threading.Lock(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                number = len(requests)
                requests.append({"path": self.path, "key": self.headers.get("Authorization"), **body})
            status, content = answer(number, body)
            if status == "wait":
                over.wait(content)
                status, content = said("Score: 10")
            try:
                if status is None:
                    self.wfile.write(content)
                    return
                self.send_response(status)
                if status in (301, 302, 307):
                    self.send_header("Location", content.decode())
                    content = b""
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(content) + (99 if content.endswith(b"CUT") else 0)))
                self.end_headers()
                self.wfile.write(content)
            except OSError:
                pass  # the client is gone

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = False  # closing it waits for all of them: none goes on beside the next test
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1", requests
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join()
