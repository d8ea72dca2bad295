"""A proxy between a host and a duck that can damage, hold and cut what it passes on."""

import contextlib
import socket
import threading


class Meddler:
    """Passes bytes both ways, and does to them what its fields say.

    target: host and port of whom later connections go to.
    source: the address that the duck sees them come from.
    to_duck, to_host: called with a chunk of that direction and the number of bytes of
        it that went before on this connection; returns what to pass on instead.
    """

    def __init__(self, endpoint, source="127.0.0.1"):
        host, _, port = endpoint.rpartition(":")
        self._source = (source, 0)
        self.target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.to_duck = self.to_host = lambda chunk, before: chunk
        # Cleared: bytes stay where they are.
        self.passes_to_duck, self.passes_to_host = threading.Event(), threading.Event()
        self.resume()
        self.num_connections = 0
        self.num_passed = {"duck": 0, "host": 0}
        self._sockets = []
        threading.Thread(target=self._accept, daemon=True).start()

    def hold(self):
        """Read no more, as if the network had swallowed both ends."""
        self.passes_to_duck.clear()
        self.passes_to_host.clear()

    def resume(self):
        self.passes_to_duck.set()
        self.passes_to_host.set()

    def cut(self):
        """Break every connection."""
        for each in self._sockets:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._sockets.clear()

    def close(self):
        # accept() does not notice a close().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # In this order: what was held is lost.
        self.cut()
        self.resume()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                host, _ = self._listener.accept()
                self.num_connections += 1
                try:
                    duck = socket.create_connection(
                        self.target, source_address=self._source
                    )
                except ConnectionRefusedError:
                    host.close()
                    continue
                for each in (host, duck):
                    # What was passed on has arrived.
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets += [host, duck]
                threading.Thread(
                    target=self._pass_both_ways, args=(host, duck), daemon=True
                ).start()

    def _pass_both_ways(self, host, duck):
        with host, duck:
            back = threading.Thread(
                target=self._pass, args=("host", duck, host), daemon=True
            )
            back.start()
            self._pass("duck", host, duck)
            back.join()

    def _pass(self, name, source, target):
        passes = getattr(self, f"passes_to_{name}")
        before = 0
        with contextlib.suppress(OSError):
            while True:
                passes.wait()
                chunk = source.recv(65536)
                if not chunk:
                    break
                passes.wait()
                target.sendall(getattr(self, f"to_{name}")(chunk, before))
                before += len(chunk)
                self.num_passed[name] += len(chunk)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


def flip(position, *, times=1):
    """Damages the byte at this position of a direction, on the first connections."""
    left = [times]

    def damage(chunk, before):
        at = position - before
        if not 0 <= at < len(chunk) or left[0] == 0:
            return chunk
        left[0] -= 1
        return chunk[:at] + bytes([chunk[at] ^ 0x10]) + chunk[at + 1 :]

    return damage
