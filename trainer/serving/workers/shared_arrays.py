"""Arrays in shared memory, and messages between processes that contain them."""

import io
import math
import mmap
import os
import pickle
import socket
import struct
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

_LENGTH = struct.Struct("<Q")
_MOST_FILES = 253
"""File descriptors in one message, a limit of Linux."""


class _Mapping(mmap.mmap):
    """Memory of one array, and the file that it is shared by; it is freed when no process has it any more."""

    file: int

    def __del__(self) -> None:
        os.close(self.file)


def allocate(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array of zeros that messages share; they copy an empty one."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if not size:
        return np.empty(shape, dtype)
    # Unlike /dev/shm, this has no limit of its own in a container.
    file = os.memfd_create("cowrec-rows")
    os.ftruncate(file, size)
    return _array(_mapped(file, size), shape, dtype)


class Messages:
    """Pickled objects over a Unix socket of the same user; whole arrays made by `allocate` are shared, not copied.

    Args:
        connection: one end of a pair of stream sockets.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._mappings: WeakValueDictionary[int, _Mapping] = WeakValueDictionary()
        """Those in use here by the number of their file, since mapping an array again would load its pages again."""

    def send(self, message: Any) -> None:
        content = io.BytesIO()
        pickler = _Pickler(content)
        pickler.dump(message)
        assert len(pickler.files) <= _MOST_FILES
        socket.send_fds(self.connection, [_LENGTH.pack(content.tell())], pickler.files)
        self.connection.sendall(content.getvalue())

    def receive(self) -> Any:
        """The next message. Raises EOFError when the other end is closed."""
        head, files, _, _ = socket.recv_fds(self.connection, _LENGTH.size, _MOST_FILES)
        content = self._read(_LENGTH.unpack(head + self._read(_LENGTH.size - len(head)))[0])
        return _Unpickler(io.BytesIO(content), [self._mapping(file) for file in files]).load()

    def _read(self, count: int) -> bytes:
        parts = []
        while count:
            parts.append(self.connection.recv(min(count, 1 << 20)))
            if not parts[-1]:
                raise EOFError("the other process has ended")
            count -= len(parts[-1])
        return b"".join(parts)

    def _mapping(self, file: int) -> _Mapping:
        about = os.fstat(file)
        known = self._mappings.get(about.st_ino)
        if known is not None:
            os.close(file)
            return known
        mapping = self._mappings[about.st_ino] = _mapped(file, about.st_size)
        return mapping


class _Pickler(pickle.Pickler):
    def __init__(self, content: io.BytesIO) -> None:
        super().__init__(content, protocol=pickle.HIGHEST_PROTOCOL)
        self.files: list[int] = []

    def persistent_id(self, value: Any) -> Any:
        memory = value
        while isinstance(memory, np.ndarray):
            memory = memory.base
        if not isinstance(memory, memoryview) or not isinstance(memory.obj, _Mapping):
            return None
        assert value.nbytes == memory.nbytes, "only whole arrays are shared"
        self.files.append(memory.obj.file)
        return len(self.files) - 1, value.shape, value.dtype.str


class _Unpickler(pickle.Unpickler):
    def __init__(self, content: io.BytesIO, mappings: list[_Mapping]) -> None:
        super().__init__(content)
        self._mappings = mappings

    def persistent_load(self, key: Any) -> NDArray[Any]:
        number, shape, dtype = key
        return _array(self._mappings[number], shape, dtype)


def _mapped(file: int, size: int) -> _Mapping:
    mapping = _Mapping(file, size)
    mapping.file = file
    return mapping


def _array(mapping: _Mapping, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    return np.frombuffer(memoryview(mapping), dtype).reshape(shape)
