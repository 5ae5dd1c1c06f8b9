"""An HTTP server that shares the connections of one socket with other processes."""

import asyncio
import errno
import socket
from typing import Any

import uvicorn


class FairServer(uvicorn.Server):
    """Accepts one connection at a time, and leaves the next to whichever process is free.

    An event loop's own server accepts all that wait, so that clients which connect together would share one process.
    """

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._opening = set[asyncio.Task[Any]]()
        await super().startup([])
        for listener in sockets or []:
            listener.setblocking(False)
            asyncio.get_running_loop().add_reader(listener, self._accept, listener)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for listener in sockets or []:
            asyncio.get_running_loop().remove_reader(listener)
        await super().shutdown(sockets)

    def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        try:
            connection = listener.accept()[0]
        except OSError as error:  # another process has accepted it, or the client has left
            if error.errno in (errno.EMFILE, errno.ENFILE):  # until connections end
                loop.remove_reader(listener)
                loop.call_later(1, loop.add_reader, listener, self._accept, listener)
            return
        task = loop.create_task(loop.connect_accepted_socket(self._protocol, connection))
        self._opening.add(task)  # a task without a reference could be lost
        task.add_done_callback(self._opening.discard)

    def _protocol(self) -> asyncio.Protocol:
        protocol: asyncio.Protocol = self.config.http_protocol_class(  # type: ignore[call-arg]
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol
